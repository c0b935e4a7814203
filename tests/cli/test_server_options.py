"""What the options of `quire serve` become, and which of their values are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.frontend.cli.serve_options import check_exposure, collect_keys, make_parser, make_server_options
from quire.frontend.http.limits import Limits
from quire.frontend.http.options import CorsOptions, ServerOptions, TlsOptions
from quire.ipc.errors import ConfigError

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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--root-path", "llm"], "root_path='llm': expected a path such as /llm"),
        (["--root-path", "/a b"], "root_path="),
        (["--metrics-prefix", "vllm-"], "metrics_prefix='vllm-'"),
        (["--allowed-origins", '["https://a"'], "allowed_origins="),
        (["--allowed-origins", "[1]"], "allowed_origins="),
        (["--allowed-hosts", ""], "allowed_hosts=''"),
        (["--allowed-hosts", "x:8000"], "allowed_hosts='x:8000': expected a name without scheme and port"),
        (["--allowed-hosts", "*x"], "allowed_hosts='*x'"),
        (["--allowed-hosts", "http://x"], "allowed_hosts='http://x'"),
        (["--allowed-origins", "https://*.x"], "allowed_origins='https://*.x': expected a page's origin"),
        (["--allowed-origins", "https://x/"], "allowed_origins='https://x/'"),
        (["--allowed-headers", "a\r\nb"], "allowed_headers='a\\r\\nb': expected the name of a header"),
        (["--allowed-methods", "\u00e9"], "allowed_methods='\u00e9': expected the name of a method"),
        (["--ssl-keyfile", PEM], "ssl_certfile=None: expected a PEM file, beside ssl_keyfile"),
        (["--ssl-certfile", "/no/such.pem"], "ssl_certfile='/no/such.pem': expected a file that can be read"),
        (["--ssl-certfile", PEM, "--ssl-cert-reqs", "5"], "ssl_cert_reqs=5: expected 0 "),
        (["--ssl-certfile", PEM, "--ssl-cert-reqs", "2"], "ssl_ca_certs=None: expected a PEM file, beside"),
        (
            ["--ssl-certfile", PEM, "--ssl-cert-reqs", "1", "--grpc-port", "0"],
            "ssl_cert_reqs=1: expected 0 or 2 with grpc_port",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_by_their_option(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(*words)
    assert str(caught.value).startswith(message)


def test_a_unix_socket_needs_no_key_whatever_the_host() -> None:
    check_exposure(make_parser().parse(["--uds", "/tmp/x.sock", "--host", "0.0.0.0"]), [])
    with pytest.raises(ConfigError, match="without an API key"):
        check_exposure(make_parser().parse(["--host", "0.0.0.0"]), [])


def test_a_file_of_keys_that_never_ends_is_refused() -> None:
    with pytest.raises(ConfigError, match="api_key_file='/dev/zero': expected a file of at most"):
        collect_keys(make_parser().parse(["--api-key-file", "/dev/zero"]))
