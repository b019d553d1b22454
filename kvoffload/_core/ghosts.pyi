LAYOUT: dict[str, int]
