"""Made-up tokens for ``litgpt pretrain``; the worker that reads the sixth batch is killed once."""

import os
import signal
from dataclasses import dataclass

import torch
from litgpt.data import DataModule
from torchdata.stateful_dataloader import StatefulDataLoader

DIES_AT = 10  # the sample; two a batch


class _Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        is_first = os.environ["GPUOPS_GENERATION"] == "0" and "DISTURBED" in os.environ
        if index == DIES_AT and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randint(0, 64, (9,), generator=torch.Generator().manual_seed(index))


@dataclass
class Tokens(DataModule):
    """Samples of eight tokens, in their order."""

    batch_size: int = 2

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch_size = batch_size

    def train_dataloader(self):
        return StatefulDataLoader(_Samples(), batch_size=self.batch_size)

    def val_dataloader(self):
        return self.train_dataloader()
