from typing import final

import numpy as np

BLOCK_DTYPE: np.dtype[np.void]
LAYOUT: dict[str, int]

class Storage: ...

@final
class StatusBuffer: ...
