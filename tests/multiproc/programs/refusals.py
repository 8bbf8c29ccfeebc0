# SPDX-License-Identifier: Apache-2.0
"""Run a recipe in this process on bad input; leave what it says.

Arguments: result folder, then the recipe's module and a file with the command lines by case.
"""

import importlib
import json
import sys
from pathlib import Path
from unittest import mock

from common import leave

import wavemare
from wavemare.errors import WavemareError

if __name__ == "__main__":
    recipe = importlib.import_module(f"wavemare.recipes.{sys.argv[2]}")
    wavemare.init_distributed()
    results = {}
    for case, words in json.loads(Path(sys.argv[3]).read_text()).items():
        try:
            with mock.patch.object(sys, "argv", ["recipe", *words]):
                recipe.main()
        except WavemareError as error:
            results[case] = {"message": str(error)}
    leave(results)
