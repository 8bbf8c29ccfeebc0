# SPDX-License-Identifier: Apache-2.0
"""Run a recipe in this process on bad input, all being imported; leave the processor seconds.

Arguments: result folder, then the recipe's module and a file with the command lines by case.
"""

import importlib
import json
import os
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

if __name__ == "__main__":
    recipe = importlib.import_module(f"wavemare.recipes.{sys.argv[2]}")
    if int(os.environ["WORLD_SIZE"]) > 1:
        wavemare.init_distributed()
        torch.distributed.barrier()
    results = {}
    for case, words in json.loads(Path(sys.argv[3]).read_text()).items():
        argv, sys.argv = sys.argv, ["recipe", *words]
        started = time.process_time()
        try:
            recipe.main()
        except WavemareError as error:
            results[case] = {"seconds": time.process_time() - started, "message": str(error)}
        sys.argv = argv
    if torch.distributed.is_initialized():
        leave(results)
    else:
        Path(sys.argv[1], "rank_0.json").write_text(json.dumps(results))
