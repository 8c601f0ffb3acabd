"""The messages of buffer.proto, for generated code that imports it. Unlike the code of protoc, it works with each
protobuf from 4.25 on. `tests/test_buffers_proto.py` compares it with protoc's."""

from google.protobuf import descriptor_pool as _descriptor_pool
from google.protobuf.internal import builder as _builder

DESCRIPTOR = _descriptor_pool.Default().AddSerializedFile(
    b'\n\x17tonic_rdma/buffer.proto\x12\x14tonic_rdma.buffer.v1"\x96\x01\n\x0cRemoteBuffer\x12\r\n\x05owner'
    b"\x18\x01 \x01(\t\x12\x12\n\ngeneration\x18\x02 \x01(\x06\x12\n\n\x02id\x18\x03 \x01(\x04\x12\x0e\n"
    b"\x06length\x18\x04 \x01(\x04\x12\r\n\x05token\x18\x05 \x01(\x0c\x12\r\n\x05dtype\x18\x06 \x01(\t\x12"
    b'\r\n\x05shape\x18\x07 \x03(\x04\x12\x11\n\x04xxh3\x18\x08 \x01(\x06H\x00\x88\x01\x01B\x07\n\x05_xxh3"'
    b'\x86\x01\n\x0cFetchRequest\x123\n\x07buffers\x18\x01 \x03(\x0b2".tonic_rdma.buffer.v1.BufferRanges'
    b"\x12,\n\x06reader\x18\x02 \x01(\x0b2\x1c.tonic_rdma.buffer.v1.Reader\x12\x13\n\x0breply_bytes\x18\x03"
    b' \x01(\x04":\n\tBufferKey\x12\x12\n\ngeneration\x18\x01 \x01(\x06\x12\n\n\x02id\x18\x02 \x01(\x04\x12'
    b'\r\n\x05token\x18\x03 \x01(\x0c"^\n\x0cBufferRanges\x12,\n\x03key\x18\x01 \x01(\x0b2\x1f.tonic_rdma.b'
    b'uffer.v1.BufferKey\x12\x0f\n\x07offsets\x18\x02 \x03(\x04\x12\x0f\n\x07lengths\x18\x03 \x03(\x04"&\n'
    b'\x06Reader\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0e\n\x06secret\x18\x02 \x01(\x0c"J\n\nFetchReply'
    b"\x12\x10\n\x08contents\x18\x01 \x03(\x0c\x12*\n\x05fault\x18\x02 \x01(\x0b2\x1b.tonic_rdma.buffer.v1."
    b'Fault"V\n\x05Fault\x12\x0e\n\x06buffer\x18\x01 \x01(\r\x12-\n\x04kind\x18\x02 \x01(\x0e2\x1f.tonic_rd'
    b'ma.buffer.v1.FaultKind\x12\x0e\n\x06reason\x18\x03 \x01(\t"\x9b\x01\n\x0cWriteRequest\x12,\n\x03key'
    b"\x18\x01 \x01(\x0b2\x1f.tonic_rdma.buffer.v1.BufferKey\x12,\n\x06reader\x18\x02 \x01(\x0b2\x1c.tonic_"
    b"rdma.buffer.v1.Reader\x12\x0e\n\x06offset\x18\x03 \x01(\x04\x12\x0e\n\x06length\x18\x04 \x01(\x04\x12"
    b'\x0f\n\x07content\x18\x05 \x01(\x0c"8\n\nWriteReply\x12*\n\x05fault\x18\x01 \x01(\x0b2\x1b.tonic_rdma'
    b".buffer.v1.Fault*\xd8\x01\n\tFaultKind\x12\x1a\n\x16FAULT_KIND_UNSPECIFIED\x10\x00\x12\x13\n\x0fFAULT"
    b"_KIND_GONE\x10\x01\x12\x16\n\x12FAULT_KIND_REVOKED\x10\x02\x12\x18\n\x14FAULT_KIND_RESTARTED\x10\x03"
    b"\x12\x1c\n\x18FAULT_KIND_NOT_PERMITTED\x10\x04\x12\x13\n\x0fFAULT_KIND_BUSY\x10\x05\x12\x1b\n\x17FAUL"
    b"T_KIND_OUT_OF_RANGE\x10\x06\x12\x18\n\x14FAULT_KIND_NO_MEMORY\x10\x072\xab\x01\n\x07Buffers\x12O\n"
    b'\x05Fetch\x12".tonic_rdma.buffer.v1.FetchRequest\x1a .tonic_rdma.buffer.v1.FetchReply0\x01\x12O\n\x05'
    b'Write\x12".tonic_rdma.buffer.v1.WriteRequest\x1a .tonic_rdma.buffer.v1.WriteReply(\x01b\x06proto3'
)

_builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
