"""An engine in miniature: real bytes between a device, host memory and tiers, every byte verified.

`device` stands for the accelerator's memory; a `TieredStore` has host memory and, behind it, a disk
and a server. Only the scheduler's thread calls the store, so it needs no lock; workers copy blocks
between device and host, and the tiers' threads do the rest. Several requests are in flight at once,
and the host is too small for all of them.

During the run the server hangs and comes back, and the file on the disk is destroyed. The only
effect is that the engine computes some blocks again.
"""

import hashlib
import random
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvoffload import CPUOffloadingManager
from kvoffload.testing.tiers import FaultyTier
from kvoffload.tiers import FileTier, Namespace, Region, TieredStore
from kvoffload.tiers.tiered_store import Fetched, TieredRequest

BLOCK_TOKENS = 16
BLOCK_BYTES = 16_384
DEADLINE_S = 0.25  # longest that a request waits for the tiers


def block_hashes(tokens: list[int]) -> list[bytes]:
    """Name each full block by its content and its whole prefix."""
    hashes, previous = [], b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.array(tokens[start : start + BLOCK_TOKENS], np.int64).tobytes()
        previous = hashlib.sha256(previous + block).digest()
        hashes.append(previous)
    return hashes


def compute(block_hash: bytes) -> np.ndarray:
    """Stand for the model: the KV data of a block follows from its content and prefix."""
    seed = int.from_bytes(block_hash[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


@dataclass
class Prompt:
    """One prompt in progress: its request, and its slots on the device."""

    request: TieredRequest
    slots: np.ndarray  # (n,) int64, slots on the device
    num_loaded: int = 0
    is_storing: bool = False


@dataclass
class Engine:
    """An engine that runs prompts through a device without a cache, and a store behind it."""

    store: TieredStore
    device: np.ndarray  # (slots, BLOCK_BYTES) uint8
    free_slots: list[int] = field(default_factory=list)
    fetching: dict[int, Prompt] = field(default_factory=dict)
    copying: dict[Future[None], Prompt] = field(default_factory=dict)
    loaded_blocks: int = 0
    computed_blocks: int = 0

    def __post_init__(self) -> None:
        self.host = self.store.region.array.reshape(-1, BLOCK_BYTES)
        self.free_slots = list(range(len(self.device)))
        self.workers = ThreadPoolExecutor(4)

    def run(self, prompts: list[list[int]]) -> None:
        """Start prompts as the device has room, and serve all of them."""
        waiting = deque(block_hashes(tokens) for tokens in prompts)
        while waiting or self.fetching or self.copying:
            while waiting and len(waiting[0]) <= len(self.free_slots):
                self.start(waiting.popleft())
            for fetched in self.store.step():
                self.fetched(self.fetching.pop(fetched.job), fetched)
            for copy in [copy for copy in self.copying if copy.done()]:
                prompt = self.copying.pop(copy)
                copy.result()
                if prompt.is_storing:
                    self.stored(prompt)
                else:
                    self.loaded(prompt)
            self.store.wait(0.001)

    def start(self, hashes: list[bytes]) -> None:
        """Fetch the prefix that host memory, the disk or the server has."""
        slots = np.array([self.free_slots.pop() for _ in hashes], np.int64)
        request = self.store.begin(hashes)
        self.fetching[request.fetch(deadline_s=DEADLINE_S)] = Prompt(request, slots)

    def fetched(self, prompt: Prompt, fetched: Fetched) -> None:
        """Copy the fetched blocks to the device; they are pinned until `loaded`."""
        prompt.num_loaded = fetched.num_blocks
        slots = prompt.slots[: prompt.num_loaded]
        self.copy(prompt, self.host, fetched.block_ids, self.device, slots)

    def loaded(self, prompt: Prompt) -> None:
        """Verify the loaded blocks, compute the rest, and store those that the host lacks."""
        request, slots, num_loaded = prompt.request, prompt.slots, prompt.num_loaded
        hashes = request.hashes
        request.complete_load(0, num_loaded)
        for block_hash, slot in zip(hashes[:num_loaded], slots[:num_loaded], strict=True):
            if not np.array_equal(self.device[slot], compute(block_hash)):
                raise RuntimeError(f"block {block_hash.hex()} came back changed")
        for block_hash, slot in zip(hashes[num_loaded:], slots[num_loaded:], strict=True):
            self.device[slot] = compute(block_hash)
        self.loaded_blocks += num_loaded
        self.computed_blocks += len(hashes) - num_loaded

        output = request.prepare_store()
        request.finish()
        if output is None:  # no room: everything is pinned or pending
            self.free_slots.extend(slots.tolist())
            return
        prompt.is_storing = True
        slot_of = dict(zip(hashes, slots.tolist(), strict=True))
        sources = np.array([slot_of[one] for one in output.block_hashes_to_store], np.int64)
        self.copy(prompt, self.device, sources, self.host, output.store_spec.block_ids)

    def stored(self, prompt: Prompt) -> None:
        """Make the stored blocks readable for other requests; they go to the tiers too."""
        prompt.request.complete_store()
        self.free_slots.extend(prompt.slots.tolist())

    def copy(
        self,
        prompt: Prompt,
        source: np.ndarray,
        source_ids: np.ndarray,
        target: np.ndarray,
        target_ids: np.ndarray,
    ) -> None:
        """Copy blocks in a worker thread; `run` handles the end."""

        def work() -> None:
            target[target_ids] = source[source_ids]

        self.copying[self.workers.submit(work)] = prompt


def conversations(count: int, turns: int, seed: int) -> list[list[int]]:
    """Make prompts: conversations over one system prompt, each turn with all turns before it."""
    chance = random.Random(seed)
    system_prompt = [chance.randrange(50_000) for _ in range(128)]
    histories = [list(system_prompt) for _ in range(count)]
    prompts = []
    for _ in range(count * turns):
        history = chance.choice(histories)
        history += [chance.randrange(50_000) for _ in range(chance.randrange(16, 96))]
        prompts.append(list(history))
    return prompts


def main(folder: Path) -> None:
    """Run with failures on the way, and print the transfers."""
    namespace = Namespace("engine in miniature", BLOCK_BYTES)
    disk = FileTier(folder, 300 * BLOCK_BYTES, policy="arc", namespace=namespace)
    server = FaultyTier(1000 * BLOCK_BYTES, namespace=namespace, name="server")
    host = Region.allocate(150, BLOCK_BYTES)
    manager = CPUOffloadingManager(BLOCK_TOKENS, 150, "arc")
    engine = Engine(
        TieredStore(host, manager, [disk, server]), np.zeros((256, BLOCK_BYTES), np.uint8)
    )
    prompts = conversations(count=24, turns=10, seed=0)

    engine.run(prompts[:100])
    server.hang()
    engine.run(prompts[100:140])
    (disk.folder / "blocks.dat").write_bytes(b"")  # the disk loses everything
    engine.run(prompts[140:180])
    server.resume()
    for tier in (disk, server):
        tier.health(reset=True)
    engine.run(prompts[180:])

    while engine.store.busy:  # the last stores are on their way to the tiers
        engine.store.wait(0.1)
        engine.store.step()
    engine.workers.shutdown()
    stats = manager.stats()
    print(f"{len(prompts)} requests of {engine.loaded_blocks + engine.computed_blocks} blocks")
    print(f"{engine.loaded_blocks} blocks loaded, every byte as computed")
    print(
        f"{disk.stats()['get_ok']} of them came from the disk, {server.stats()['get_ok']} from the"
    )
    print(f"server; {disk.stats()['get_corrupt']} blocks that the disk had lost were found out")
    print(f"at the end {stats['pinned']} pinned, {stats['pending']} pending")
    engine.store.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
