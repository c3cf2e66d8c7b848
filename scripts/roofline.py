"""Print the bytes and FLOPs of each kernel, and the least time that they take on each chip.

python scripts/roofline.py
"""

import argparse

from et_jax.evidence.roofline import roofline


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(roofline())


if __name__ == "__main__":
    main()
