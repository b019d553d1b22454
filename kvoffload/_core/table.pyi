import numpy as np

BLOCK_DTYPE: np.dtype[np.void]
LAYOUT: dict[str, int]

class Storage: ...
class StatusBuffer: ...
