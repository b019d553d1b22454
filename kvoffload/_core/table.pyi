from typing import final

LAYOUT: dict[str, int]

class Storage: ...

@final
class StatusBuffer: ...
