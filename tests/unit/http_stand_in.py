"""A server on loopback that speaks the routes of vLLM's which ``stretto.rollout.http`` uses, and misbehaves on demand.

It reads weights from the folder that it is told, as the real one does, and answers with tokens that follow from the
seed alone. ``speaks = "0.26"`` leaves out what that version does not have.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors import safe_open

TOKENS = 5
"""Of every answer, unless it is told other ids."""


class StandIn:
    """``faults``: one is taken by each generate request, in order; "" is none. ``seen``: the path and the JSON of all
    requests but health's.
    """

    def __init__(self, *, speaks: str = "0.32"):
        self.speaks = speaks
        self.faults: list[str] = []
        self.ids: list[int] = []
        self.seen: list[tuple[str, Any]] = []
        self.options: dict[str, Any] = {
            "logprobs_mode": "processed_logprobs",
            "quantization": None,
            "max_model_len": 100,
            "max_num_seqs": 8,
            "enable_chunked_prefill": True,
            "device": "cuda",
            "mm_device_do_normalize": False,
            "invariant": False,
        }
        self.measure = ""
        """What log-probs really are, where it is not what the options say."""
        self.tag = "default"
        self.started = 100.0
        self.paused = False
        self.healthy = True
        self.blind: set[str] = set()
        """Paths without a route."""
        self.scale_out = True
        self.sees_folder = True
        self.forgets = False
        """Takes new weights without a word, and keeps the old ones."""
        self.checksums: dict[str, str] = {}
        self.released = threading.Event()
        self.connections: list[socket.socket] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]

    def requests(self) -> list[Any]:
        """Those to generate, without probes."""
        return [body for path, body in self.seen if path.endswith("generate") and "cache_salt" in body]

    def close(self) -> None:
        """As a server that is killed: connections end, too. May be called again."""
        self.released.set()
        self._server.shutdown()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()

    # Routes --------------------------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        o = self.options
        model = {k: o[k] for k in ("logprobs_mode", "quantization", "max_model_len")}
        model |= {"model": "a/model", "dtype": "torch.float32"}
        model |= {"multimodal_config": {"mm_device_do_normalize": o["mm_device_do_normalize"]}}
        scheduler = {k: o[k] for k in ("max_num_seqs", "enable_chunked_prefill")}
        config = {"model_config": model, "scheduler_config": scheduler, "device_config": {"device": o["device"]}}
        return {"vllm_config": config, "vllm_env": {"VLLM_BATCH_INVARIANT": o["invariant"]}}

    def reload(self, path: str, checkpoint: bool) -> tuple[int, Any]:
        files = sorted(Path(path).glob("*.safetensors")) if self.sees_folder else []
        if not files:
            return 500, {"error": {"message": f"Cannot find any model weights with `{path}`"}}
        if not checkpoint or self.forgets:
            return 200, {"results": [None]}
        for file in files:
            with safe_open(file, "np") as held:
                for name in held.keys():  # noqa: SIM118 (it is no dict)
                    renamed = name.replace("model.language_model.", "language_model.model.").removeprefix("model.")
                    self.checksums[f"dp0:pp0:pcp0:tp0:{renamed}"] = hashlib.sha256(
                        held.get_tensor(name).tobytes()
                    ).hexdigest()
        return 200, {"results": [None]}

    def generate(self, body: dict[str, Any], fault: str) -> tuple[int, Any]:
        params = body["sampling_params"]
        if "allowed_token_ids" in params:
            ids = params["allowed_token_ids"]
            logprobs = [0.0 if (self.measure or self.options["logprobs_mode"]).startswith("processed") else -3.0]
        else:
            ids = self.ids or [(params["seed"] + i) % 90 + 3 for i in range(TOKENS)]
            logprobs = [-0.5 - i for i in range(len(ids))]
        content: list[dict[str, Any]] = [{"token_id": i, "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
        if fault == "no log-prob":
            content[2]["logprob"] = -9999.0
        if fault == "too few":
            content.pop()
        if self.speaks == "0.26":
            content = [{"token": f"token_id:{c['token_id']}", "logprob": c["logprob"]} for c in content]
        finish = fault.removeprefix("finish ") if fault.startswith("finish ") else "length"
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish}
        read = body["token_ids"] + ([9] if fault == "other prompt" else [])
        answer = {"choices": [choice], "usage": {"prompt_tokens": len(read)}}
        if self.speaks != "0.26":
            choice["weight_versions"] = [{"version": self.tag, "start": 0, "end": len(ids)}]
            answer["prompt_token_ids"] = read
        return 200, answer

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        old = self.speaks == "0.26"
        name = path.partition("?")[0]
        if name in self.blind or (old and name in ("/weight_info", "/weight_checker", "/update_weight_version")):
            return 404, {"detail": "Not Found"}
        if name == "/version":
            return 200, {"version": f"{self.speaks}.0"}
        if name == "/server_info":
            return 200, self.info()
        if name == "/is_paused":
            return 200, {"is_paused": self.paused}
        if name == "/weight_info":
            return 200, {"weight_version": self.tag}
        if name in ("/pause", "/resume"):
            self.paused = name == "/pause"
            return 200, {"status": "ok"}
        if name == "/collective_rpc":
            return self.reload(body["kwargs"]["weights_path"], body["kwargs"].get("is_checkpoint_format", True))
        if name == "/weight_checker":
            return 200, {"checksums": self.checksums}
        if name == "/update_weight_version":
            self.tag = body["new_version"]
            return 200, {"success": True}
        if name == "/reset_prefix_cache":
            return 200, {"success": True}
        if name in ("/reset_mm_cache", "/reset_encoder_cache"):
            return 200, None
        return 404, {"detail": "Not Found"}


def handler(server: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # which would hold back what follows the headers for 40 ms

        def setup(self) -> None:
            super().setup()
            server.connections.append(self.connection)

        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(200 if server.healthy else 503, None)
            elif self.path == "/metrics":
                self.text(200, f"# HELP x y\nprocess_start_time_seconds {server.started}\n".encode())
            else:
                server.seen.append((self.path, None))
                self.reply(*server.answer("GET", self.path, None))

        def do_POST(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            raw = self.rfile.read(length)
            if len(raw) < length:  # the client has gone
                self.close_connection = True
                return
            body = json.loads(raw) if raw else None
            server.seen.append((self.path, body))
            if not self.path.endswith("generate"):
                self.reply(*server.answer("POST", self.path, body))
                return
            if not server.scale_out:
                self.reply(
                    403, {"error": {"message": "Scale-out endpoints are disabled. Restart with --enable-scale-out"}}
                )
                return
            fault = server.faults.pop(0) if server.faults and "cache_salt" in body else ""
            if fault.isdigit():
                self.reply(int(fault), {"error": {"message": f"told to answer {fault}"}})
                return
            if fault == "slow":
                server.released.wait(30)
            if fault == "not JSON":
                self.text(200, b"<html>a proxy's page</html>")
                return
            status, answer = server.generate(body, fault)
            if fault == "closes":
                self.send_response(200)
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.close_connection = True
                return
            self.reply(status, answer)

        def reply(self, status: int, answer: Any) -> None:
            self.text(status, b"" if answer is None else json.dumps(answer).encode())

        def text(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, TimeoutError):  # the client has gone, which tests do on purpose
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
