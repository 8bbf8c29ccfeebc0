"""Run a recipe in this process on bad input after everything is imported; leave the seconds.

Arguments: result folder, then a file with the command lines by case.
"""

import json
import sys
import time
from pathlib import Path

import datasets  # noqa: F401
import torch
from common import leave
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

import wavemare
from wavemare.data import EncodedDataset, MaskedDataset, load_documents  # noqa: F401
from wavemare.errors import WavemareError
from wavemare.recipes.gpt import pretrain

if __name__ == "__main__":
    wavemare.init_distributed()
    torch.distributed.barrier()
    results = {}
    for case, words in json.loads(Path(sys.argv[2]).read_text()).items():
        argv, sys.argv = sys.argv, ["pretrain", *words]
        started = time.perf_counter()
        try:
            pretrain.main()
        except WavemareError as error:
            results[case] = {"seconds": time.perf_counter() - started, "message": str(error)}
        sys.argv = argv
    leave(results)
