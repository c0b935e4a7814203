"""The gRPC API, for who installs quire[grpc]: the same requests, checks, limits and errors as over HTTP.

`quire_engine.proto` is the contract. `quire_engine_pb2` is made of it, in this folder, by the oldest
grpcio-tools that the extra allows, because a protobuf older than the one that made it refuses it:
`python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. quire_engine.proto`.
"""
