"""What the options of `quire serve` become, and which of their values are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.frontend.cli.serve_options import check_exposure, collect_keys, make_parser, make_server_options
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import CorsOptions, ServerOptions, TlsOptions
from quire.ipc.errors import ConfigError
from refusals import Refusal, refusals

PEM = str(Path(__file__).parents[1] / "localhost.pem")


def make(*words: str) -> ServerOptions:
    return make_server_options(make_parser().parse(words), [], Limits())


def test_who_gives_none_of_the_options_has_a_server_without_them() -> None:
    options = make()
    assert (options.uds, options.root_path, options.allowed_hosts) == (None, "", ())
    assert (options.cors, options.tls, options.enable_request_id_headers) == (None, None, False)
    assert (options.metrics_prefix, options.has_access_log) == ("quire:", True)


def test_origins_are_given_one_by_one_or_as_vllm_takes_them() -> None:
    listed = make("--allowed-origins", '["https://a", "https://b"]', "--allowed-headers", '["*"]')
    assert listed.cors == CorsOptions(origins=("https://a", "https://b"))
    words = ("--allowed_origins=https://a", "--allowed-origins", "https://b", "--allowed-methods", "GET")
    given = make(*words, "--allow-credentials")
    assert given.cors == CorsOptions(
        origins=("https://a", "https://b"), methods=("GET",), allows_credentials=True
    )
    assert make("--allowed-methods", '["*"]').cors is None


def test_files_paths_and_names_are_taken_as_they_are_meant() -> None:
    options = make("--ssl-certfile", PEM, "--root-path", "/a/b/", "--allowed-hosts", "x.example")
    assert options.tls == TlsOptions(certfile=PEM)
    assert (options.root_path, options.allowed_hosts) == ("/a/b", ("x.example",))
    quiet = make("--disable-uvicorn-access-log", "--disable-access-log-for-endpoints", "/health,/metrics")
    assert (quiet.has_access_log, quiet.unlogged_paths) == (False, ("/health", "/metrics"))


@refusals("server_options")
def test_values_that_cannot_be_are_refused_by_their_option(refusal: Refusal) -> None:
    refusal.check(lambda words: make(*(PEM if word == "PEM" else word for word in words)))


def test_a_unix_socket_needs_no_key_whatever_the_host() -> None:
    check_exposure(make_parser().parse(["--uds", "/tmp/x.sock", "--host", "0.0.0.0"]), [])
    with pytest.raises(ConfigError, match="without an API key"):
        check_exposure(make_parser().parse(["--host", "0.0.0.0"]), [])


def test_a_file_of_keys_that_never_ends_is_refused() -> None:
    with pytest.raises(ConfigError, match="api_key_file='/dev/zero': expected a file of at most"):
        collect_keys(make_parser().parse(["--api-key-file", "/dev/zero"]))
