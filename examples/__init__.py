"""Programs and policies that show how the library is used."""
