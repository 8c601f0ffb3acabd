"""python -m tonic_rdma doctor | compare"""

import argparse
import sys

from tonic_rdma import _compare, _doctor


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tonic_rdma", description="Commands of the package tonic_rdma."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in (("doctor", _doctor), ("compare", _compare)):
        command = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        module.add_options(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args()
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
