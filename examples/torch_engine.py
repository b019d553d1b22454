"""A paged engine on PyTorch: real attention, and real copies between a device and host memory.

The model has random weights in the shape of a real one. Prompts are computed in chunks, their keys
and values lie in blocks on the device, and a `TieredStore` keeps the blocks of ended requests in
host memory and in a slab. A prompt comes back three times: it is recomputed, loaded from host
memory, and loaded from the slab. The program compares the answers, which must be equal, and prints
the time to the first token. Usage::

    python examples/torch_engine.py [--shape tiny|8b] [--tokens N] [--rounds N] [--folder DIRECTORY]

It runs on the first CUDA device, else on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as torch_f
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kvoffload import CPUOffloadingManager
from kvoffload.tiers import FileTier, Namespace, Region, TieredStore

BLOCK_TOKENS = 16
CHUNK_TOKENS = 2048  # most that one step computes
ANSWER_TOKENS = 16
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, as configurations of Llama name them."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    vocabulary: int
    prompt_tokens: int  # of the prompt that comes back, if none are named

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The keys and values of a block: layers, both, tokens, heads, head size."""
        return (self.layers, 2, BLOCK_TOKENS, self.kv_heads, self.head_size)


SHAPES = {
    "tiny": Shape(2, 128, 4, 2, 32, 256, 1000, 400),
    "8b": Shape(32, 4096, 32, 8, 128, 14_336, 128_256, 32_000),
}


class Model:
    """A decoder with grouped queries, rotary positions and random weights."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)

        def random(*sizes: int) -> Tensor:
            values = torch.randn(sizes, generator=generator, device=device, dtype=self.dtype)
            return values * sizes[-1] ** -0.5

        width, size = shape.hidden_size, shape.head_size
        self.embedding = random(shape.vocabulary, width)
        self.layers = [
            {
                "qkv": random((shape.heads + 2 * shape.kv_heads) * size, width),
                "out": random(width, shape.heads * size),
                "gate_up": random(2 * shape.mlp_size, width),
                "down": random(width, shape.mlp_size),
            }
            for _ in range(shape.layers)
        ]
        frequencies = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
        self.frequencies = 10_000.0**-frequencies

    def forward(self, tokens: Tensor, start: int, blocks: Tensor, kv: Tensor) -> Tensor:
        """Compute tokens from position `start` on; return the logits after the last one.

        Their keys and values go to `kv`, which has those of the tokens before; ``blocks[i]`` is the
        place of the i-th block of the prompt in it.
        """
        shape, count = self.shape, len(tokens)
        positions = torch.arange(start, start + count, device=self.device)
        places, offsets = blocks[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        angles = positions[:, None].float() * self.frequencies
        turns = torch.polar(torch.ones_like(angles), angles)[:, None, :]
        used = blocks[: (start + count + BLOCK_TOKENS - 1) // BLOCK_TOKENS]
        causal = causal_lower_right(count, start + count)
        hidden = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            states = normalized(hidden) @ layer["qkv"].T
            split = states.view(count, shape.heads + 2 * shape.kv_heads, shape.head_size)
            query, key, value = split.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            kv[places, index, 0, offsets] = rotated(key, turns)
            kv[places, index, 1, offsets] = value
            keys, values = (
                kv[used, index, which].flatten(0, 1)[: start + count].transpose(0, 1)
                for which in (0, 1)
            )
            attended = torch_f.scaled_dot_product_attention(
                rotated(query, turns).transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=causal,
                enable_gqa=True,
            )
            hidden = hidden + attended[0].transpose(0, 1).flatten(1) @ layer["out"].T
            gate, up = (normalized(hidden) @ layer["gate_up"].T).chunk(2, dim=1)
            hidden = hidden + (torch_f.silu(gate) * up) @ layer["down"].T
        return normalized(hidden[-1:]) @ self.embedding.T


def normalized(hidden: Tensor) -> Tensor:
    """Return states divided by their root mean square."""
    return torch_f.rms_norm(hidden, hidden.shape[-1:])


def rotated(states: Tensor, turns: Tensor) -> Tensor:
    """Return queries or keys turned by their positions."""
    pairs = torch.view_as_complex(states.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).to(states.dtype)


def block_hashes(tokens: list[int]) -> list[bytes]:
    """Name each full block by its content and its whole prefix."""
    hashes, previous = [], b""
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.array(tokens[start : start + BLOCK_TOKENS], np.int64).tobytes()
        previous = hashlib.sha256(previous + block).digest()
        hashes.append(previous)
    return hashes


@dataclass
class Served:
    """What a request cost: seconds to its first token, and those in calls of the store."""

    answer: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    store_s: float = 0.0
    loaded_blocks: int = 0

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Count the time of calls of the store."""
        start = time.perf_counter()
        yield
        self.store_s += time.perf_counter() - start


class Engine:
    """An engine that serves one request at a time, with a store behind it or without."""

    def __init__(self, model: Model, num_blocks: int) -> None:
        shape = model.shape
        self.model = model
        self.kv = torch.zeros(
            (num_blocks, *shape.block_shape), dtype=model.dtype, device=model.device
        )
        self.device_blocks = self.kv.flatten(1).view(torch.uint8)  # (blocks, bytes)
        self.block_bytes = self.device_blocks.shape[1]
        self.region = Region.allocate(num_blocks, self.block_bytes)  # whole pages, for the slab
        self.host_blocks = torch.from_numpy(self.region.array).view(num_blocks, -1)
        if model.device.type == "cuda":  # pinned, as a fast copy needs it
            memory = self.host_blocks
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            )

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def serve(self, tokens: list[int], store: TieredStore | None) -> Served:
        """Load what the store has of a prompt, compute the rest, and answer."""
        self.synchronize()
        start, served = time.perf_counter(), Served()
        blocks = torch.arange(len(self.kv), device=self.model.device)
        hashes = block_hashes(tokens[:-1])  # the last token is computed: the answer follows it
        request = None
        if store is not None:
            with served.calls():
                request = store.begin(hashes)
                job = request.fetch(deadline_s=DEADLINE_S)
                ended = {one.job: one for one in store.step()}
            while job not in ended:
                store.wait(DEADLINE_S)
                ended = {one.job: one for one in store.step()}
            served.loaded_blocks = ended[job].num_blocks
            for place, block_id in enumerate(ended[job].block_ids.tolist()):
                self.device_blocks[place].copy_(self.host_blocks[block_id], non_blocking=True)
            self.synchronize()
            with served.calls():
                request.complete_load(0, served.loaded_blocks)
        logits = self.compute(tokens, served.loaded_blocks * BLOCK_TOKENS, len(hashes), blocks)
        served.answer.append(int(logits.argmax()))
        served.first_token_s = time.perf_counter() - start
        while len(served.answer) < ANSWER_TOKENS:
            last = torch.tensor(served.answer[-1:], device=self.model.device)
            position = len(tokens) + len(served.answer) - 1
            logits = self.model.forward(last, position, blocks, self.kv)
            served.answer.append(int(logits.argmax()))
        if request is not None:
            output = request.prepare_store()
            if output is not None:
                place_of = {key: place for place, key in enumerate(hashes)}
                ids = output.store_spec.block_ids.tolist()
                for key, block_id in zip(output.block_hashes_to_store, ids, strict=True):
                    source = self.device_blocks[place_of[key]]
                    self.host_blocks[block_id].copy_(source, non_blocking=True)
                self.synchronize()
                request.complete_store()
            request.finish()
        return served

    def compute(self, tokens: list[int], start: int, full_blocks: int, blocks: Tensor) -> Tensor:
        """Compute a prompt from a position on, in chunks; return the logits after it.

        A chunk ends with the last full block, so that what follows is computed in the same shapes
        whether or not the blocks before were loaded.
        """
        whole = torch.tensor(tokens, device=self.model.device)
        prefix = full_blocks * BLOCK_TOKENS
        bounds = [*range(start, prefix, CHUNK_TOKENS), prefix, len(tokens)]
        logits = torch.empty(0)
        for first, stop in itertools.pairwise(bounds):
            logits = self.model.forward(whole[first:stop], first, blocks, self.kv)
        return logits


def opened(engine: Engine, folder: Path) -> TieredStore:
    """Return a store with empty host memory, over what the slab has."""
    num_blocks = engine.region.num_blocks
    namespace = Namespace(
        "random weights", engine.block_bytes, layout=list(engine.model.shape.block_shape)
    )
    disk = FileTier(folder, num_blocks * engine.block_bytes, namespace=namespace)
    manager = CPUOffloadingManager(BLOCK_TOKENS, num_blocks, "hit-density")
    return TieredStore(engine.region, manager, [disk])


def wait(store: TieredStore) -> None:
    """Wait until the slab has what was stored."""
    while store.busy:
        store.wait(1.0)
        store.step()


def report(name: str, rounds: int, serve: Callable[[], Served]) -> list[int]:
    """Print the median time to the first token; return the answer, the same in all rounds."""
    found = [serve() for _ in range(rounds)]
    if any(one.answer != found[0].answer for one in found):
        raise RuntimeError(f"{name}: the answers differ")
    first = statistics.median(one.first_token_s for one in found)
    share = statistics.median(one.store_s / one.first_token_s for one in found)
    loaded = f"{found[0].loaded_blocks:,} blocks loaded, {share * 100:.2f} % in the store's calls"
    print(f"{name:18}{first * 1000:9.1f} ms   {loaded if found[0].loaded_blocks else ''}".rstrip())
    return found[0].answer


def main(shape: Shape, tokens: int, rounds: int, folder: Path) -> None:
    """Serve a prompt that comes back, and print the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = Engine(Model(shape, device), (tokens + ANSWER_TOKENS) // BLOCK_TOKENS + 1)
    chance = np.random.default_rng(0)
    prompt = chance.integers(0, shape.vocabulary, tokens).tolist()
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{where}, {tokens:,} tokens, blocks of {engine.block_bytes:,} bytes; to the first token:"
    )
    engine.serve(prompt[: BLOCK_TOKENS + 1], None)  # the first call of a device takes longer
    answers = [report("recomputed", rounds, lambda: engine.serve(prompt, None))]
    with opened(engine, folder) as store:
        engine.serve(prompt, store)
        wait(store)
        answers.append(report("from host memory", rounds, lambda: engine.serve(prompt, store)))

    def after_restart() -> Served:
        engine.region.array[:] = 0
        with opened(engine, folder) as store:
            return engine.serve(prompt, store)

    answers.append(report("from the slab", rounds, after_restart))
    if any(answer != answers[0] for answer in answers):
        raise RuntimeError("the answers differ")
    print(f"the same {ANSWER_TOKENS} tokens each time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the slab; by default a temporary one")
    chosen = parser.parse_args()
    wanted = SHAPES[chosen.shape]
    with tempfile.TemporaryDirectory(dir=chosen.folder) as temporary, torch.inference_mode():
        main(wanted, chosen.tokens or wanted.prompt_tokens, chosen.rounds, Path(temporary))
