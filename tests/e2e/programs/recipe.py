# SPDX-License-Identifier: Apache-2.0
"""Go on as ``python -m MODULE OPTIONS`` would. Arguments: result folder, module, its options."""

import runpy
import sys

if __name__ == "__main__":
    _, _, module, *options = sys.argv
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
