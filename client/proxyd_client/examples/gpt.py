"""A small GPT over bytes, and something to read: the language reference that comes with Python."""

from __future__ import annotations

import argparse
import pydoc_data.topics
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

VOCABULARY = 256


def add_model_arguments(parser: argparse.ArgumentParser, width: int = 64, context: int = 128) -> None:
    """Size of the model and of what it reads at a time."""
    parser.add_argument("--width", type=int, default=width, help=f"of the residual stream (default: {width})")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the whole model (default: 4)")
    parser.add_argument("--heads", type=int, default=4, help="of attention (default: 4)")
    parser.add_argument("--context", type=int, default=context, help=f"tokens of a sequence (default: {context})")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the text's order (default: 1)")


class Blocks(nn.Module):
    """Some layers of the model: with the embedding in front if they are the first, the head behind if the last."""

    def __init__(self, options: argparse.Namespace, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        width = options.width
        self.embedding = nn.Embedding(VOCABULARY, width) if first else None
        self.position = nn.Parameter(torch.randn(options.context, width) * 0.02) if first else None
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, options.heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY)) if last else None
        mask = nn.Transformer.generate_square_subsequent_mask(options.context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, values: Any) -> Any:
        """Tokens or activations to activations or logits."""
        if self.embedding is not None:
            values = self.embedding(values) + self.position
        for block in self.blocks:
            values = block(values, src_mask=self.mask, is_causal=True)
        return values if self.head is None else self.head(values)


def loss_of(logits: Any, targets: Any) -> Any:
    """Cross entropy of the next byte, in nats."""
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def batches(options: argparse.Namespace, sequences: int, part: int) -> Iterator[tuple[Any, Any]]:
    """Endless ``(tokens, targets)`` of ``sequences`` each; every ``part`` reads places of its own."""
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(options.seed * 1000 + part)
    while True:
        starts = torch.randint(len(data) - options.context - 1, (sequences,), generator=generator)
        windows = torch.stack([data[start : start + options.context + 1] for start in starts.tolist()])
        yield windows[:, :-1], windows[:, 1:].contiguous()
