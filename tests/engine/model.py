"""A small language model, made on the spot: random weights that attend, words that are numbers.

The words of `kvoffload workload` are in its vocabulary, too.

Nothing is downloaded. Random weights as transformers draws them barely look at the context: answers
would be right even from a cache that is full of zeros. So the projections are scaled up until every
token of the prompt matters; the tests see it when they load zeros.
"""

from __future__ import annotations

from pathlib import Path

from kvoffload.traces.prompts import WORDS

NUM_WORDS = 1000
MAX_TOKENS = 1024  # of a prompt and its answer
SPECIAL = ("<unknown>", "<end>", "<user>", "<model>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<user> ' if message.role == 'user' else '<model> ' }}{{ message.content }} <end> "
    "{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
LAYERS, HEADS, HEAD_SIZE = 2, 2, 32  # enough for the tests
STATE_KINDS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
STATE_HEADS, STATE_HEAD_SIZE = 2, 256
SCALE = 6.0  # of the projections; 1 is what transformers draws


def word(number: int) -> str:
    """Return a word of the vocabulary."""
    return f"w{number}"


def token_bytes(layers: int = LAYERS, heads: int = HEADS, head_size: int = HEAD_SIZE) -> int:
    """Return the size of a token's keys and values, which are 32-bit floats."""
    return 2 * layers * heads * head_size * 4


def write_tokenizer(folder: Path) -> int:
    """Write the tokenizer; return the size of its vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *map(word, range(NUM_WORDS)), *WORDS]
    backend = Tokenizer(
        WordLevel({text: number for number, text in enumerate(words)}, unk_token=SPECIAL[0])
    )
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=TEMPLATE,
        model_max_length=MAX_TOKENS,
    )
    tokenizer.save_pretrained(folder)
    return len(words)


def make_model(
    folder: Path, layers: int = LAYERS, heads: int = HEADS, head_size: int = HEAD_SIZE
) -> Path:
    """Write weights, configuration and tokenizer, the same ones each time; return the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=write_tokenizer(folder),
            hidden_size=heads * head_size,
            intermediate_size=2 * heads * head_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=MAX_TOKENS,
            bos_token_id=None,
            eos_token_id=1,
            tie_word_embeddings=False,
        )
    ).float()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "_proj" in name:
                weights.mul_(SCALE)
    model.save_pretrained(folder)
    return folder


def make_state_model(folder: Path) -> Path:
    """Write a model whose layers but the last keep states, as its weights are drawn.

    The kernels for a CPU take states of 128 by 128 in bfloat16. The one layer of attention is wide,
    so that a block of it, which is as large as a state, has few tokens.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=write_tokenizer(folder),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=len(STATE_KINDS),
        layer_types=list(STATE_KINDS),
        num_attention_heads=STATE_HEADS,
        num_key_value_heads=STATE_HEADS,
        head_dim=STATE_HEAD_SIZE,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    Qwen3NextForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder
