"""The gRPC API, for who installs quire[grpc]: the same requests, checks, limits and errors as over HTTP.

`quire_engine.proto` is the contract; `quire_engine_pb2` is made of it (docs/architecture.md says how).
"""
