"""Other people's engines: what plugs the library into them."""
