"""`python -m meshnet.model.gguf_config FILE`: print the config a GGUF file describes, as JSON."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# transformers types its configs loosely.

from __future__ import annotations

import sys
from pathlib import Path

from transformers import AutoConfig


def main() -> None:
    """Read the path from the command line; write JSON to stdout."""
    path = Path(sys.argv[1])
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    sys.stdout.write(config.to_json_string(use_diff=False))


if __name__ == "__main__":
    main()
