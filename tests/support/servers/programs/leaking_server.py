"""A paced server that prints, sends and dies with the secrets in the lines of the file ``--secrets``."""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import paced_server

HALF_LINE = 1_000_000


def say(text):
    rest = text.encode()
    while rest:
        rest = rest[os.write(1, rest) :]


class LeakingServer(paced_server.Server):
    """Refuses the second request with the secrets, and may die with them on the fourth."""

    secrets = ()
    dies = False
    num_requests = 0

    async def respond(self, path, headers, body, writer):
        if path != "/v1/completions":
            self.answer(writer, 200, {"models": [], "api_key": "tiny", "note": f"started with {self.secrets}"})
            return
        self.num_requests += 1
        for secret in self.secrets:
            say(f"request {headers['x-request-id']} authorised by Bearer {secret}\n")
        if self.num_requests == 2:
            self.answer(writer, 400, {"error": {"message": f"the keys {self.secrets} may not do that"}})
            return
        if self.num_requests == 4 and self.dies:
            for secret in self.secrets:
                sys.stderr.write(f"\nfatal: cannot reach https://user:{secret}@hub.example/x?token={secret}")
            sys.stderr.flush()
            os._exit(3)
        await super().respond(path, headers, body, writer)

    def answer(self, writer, status, document):
        content = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)


def leak(secret):
    say(f"starting with HF_TOKEN={secret} and --api-key {secret}\n")
    half = len(secret) // 2
    say(f"a key in two writes: {secret[:half]}")
    time.sleep(0.3)
    say(f"{secret[half:]}\n")
    os.write(1, b"\xff\xfe " + json.dumps({"Authorization": f"Bearer {secret}"}).encode() + b"\n")


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--secrets", type=Path, required=True)
    parser.add_argument("--dies", action="store_true")
    options, rest = parser.parse_known_args()
    LeakingServer.secrets, LeakingServer.dies = tuple(options.secrets.read_text().splitlines()), options.dies
    for secret in LeakingServer.secrets:
        leak(secret)
    say(f'{"x" * HALF_LINE}"{LeakingServer.secrets[0]}"{"y" * HALF_LINE}\n')
    sys.argv = [sys.argv[0], *rest]
    paced_server.Server = LeakingServer
    asyncio.run(paced_server.main())


if __name__ == "__main__":
    main()
