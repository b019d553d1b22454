ID_BYTES: int
LINE_BYTES: int

def packed(hashes: list[bytes], more_tokens: int = 0, said: int = 0) -> bytes: ...
def request_lines(
    requests: list[bytes], low: int, high: int, start: int, block_tokens: int
) -> bytes: ...
