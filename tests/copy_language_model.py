"""What a copy of fashionmnist_ddp changes to train a small language model: see copies.py."""

import torch
import torch.nn as nn
import torch.nn.functional as F

RUN = "language_model"  # in the checkpoint: it is only resumed under the same name
SAMPLES = "sequences"  # in log lines and in the checkpoint: what is counted


class LanguageModel(nn.Module):
    """Tokens (N, 16) to logits (N, 16, 32) of the next tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 32)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(16))

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens), self.mask, is_causal=True))


def build_model(args, device):
    """Return the model and its optimizer. Each parameter group has its own peak learning rate."""
    model = LanguageModel().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)


def prepare_data(args):
    """Do nothing: the data is generated."""


def load_data(args, train_set):
    """Return tokens (N, 16) and the next tokens (N, 16): each is 5 times the last, plus 3."""
    generator = torch.Generator().manual_seed(int(train_set))
    tokens = [torch.randint(32, (192 if train_set else 48,), generator=generator)]
    for _ in range(16):
        tokens.append((5 * tokens[-1] + 3) % 32)
    tokens = torch.stack(tokens, 1)
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_correct(model, tokens, next_tokens):
    """Return the sums over sequences of the mean loss and the mean accuracy of their tokens."""
    logits = model(tokens)
    losses = F.cross_entropy(logits.transpose(1, 2), next_tokens, reduction="none")
    return losses.mean(1).sum(), (logits.argmax(2) == next_tokens).float().mean(1).sum()
