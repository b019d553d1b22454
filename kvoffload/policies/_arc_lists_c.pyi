from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from kvoffload.policies._twin_c import CompiledPolicy
from kvoffload.types import BlockHash, BlockStatus

class ARCLists(CompiledPolicy):
    @property
    def t1(self) -> Mapping[BlockHash, BlockStatus]: ...
    @property
    def t2(self) -> Mapping[BlockHash, BlockStatus]: ...
    @property
    def b1(self) -> AbstractSet[BlockHash]: ...
    @property
    def b2(self) -> AbstractSet[BlockHash]: ...
    @property
    def target_t1_size(self) -> float: ...
