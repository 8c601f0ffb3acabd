package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/golang/protobuf/proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"interop/checked"
)

// checkedCases are those whose payloads are checked byte for byte by both sides (interop/proto/checked.proto).
var checkedCases = []namedCase{
	{"checked_unary", checkedUnary},
	{"checked_client_streaming", checkedClientStreaming},
	{"checked_server_streaming", checkedServerStreaming},
	{"checked_ping_pong", checkedPingPong},
	{"checked_half_close", checkedHalfClose},
	{"checked_concurrent", checkedConcurrent},
	{"checked_gzip", checkedGzip},
	{"checked_binary_metadata", checkedBinaryMetadata},
	{"checked_large_metadata", checkedLargeMetadata},
	{"checked_status_details", checkedStatusDetails},
}

var checkedSizes = []int{0, 1, 1000, 20_000, 1 << 20, 8 << 20}

func checkedStub(to target) checked.CheckedClient { return checked.NewCheckedClient(to) }

func asked(seed uint32, length, reply int, period uint32) *checked.CheckedRequest {
	payload := content(seed, length, period)
	return &checked.CheckedRequest{
		Seed: seed, Payload: payload, ReplySeed: seed + 1000, ReplyBytes: uint32(reply), Period: period,
	}
}

func right(reply *checked.CheckedReply, seed uint32, length, received int, period uint32) error {
	return first(
		expect("seed", reply.GetSeed(), seed),
		expect("reply's bytes", len(reply.GetPayload()), length),
		expect("first wrong byte, from 1", firstMismatch(seed, reply.GetPayload(), period), uint64(0)),
		expect("bytes the server received", reply.GetReceivedBytes(), uint64(received)),
		expect("first wrong byte the server received, from 1", reply.GetFirstMismatch(), uint64(0)),
	)
}

func bothWays(ctx context.Context, to target, seed uint32, length, reply int, period uint32, options ...grpc.CallOption) error {
	got, err := checkedStub(to).Unary(ctx, asked(seed, length, reply, period), options...)
	return first(err, right(got, seed+1000, reply, length, period))
}

func checkedUnary(ctx context.Context, to target) error {
	for seed, size := range checkedSizes {
		if err := bothWays(ctx, to, uint32(seed), size, size, 0); err != nil {
			return err
		}
	}
	// The server's own check: the last of 100 bytes is wrong.
	spoiled := asked(1, 100, 0, 0)
	spoiled.Payload[99] ^= 1
	reply, err := checkedStub(to).Unary(ctx, spoiled)
	return first(err, expect("what the server says is wrong", reply.GetFirstMismatch(), uint64(100)))
}

func checkedClientStreaming(ctx context.Context, to target) error {
	stream, err := checkedStub(to).Collect(ctx)
	if err != nil {
		return err
	}
	total := 0
	for seed, size := range checkedSizes {
		if err := stream.Send(asked(uint32(seed), size, 0, 0)); err != nil {
			return err
		}
		total += size
	}
	reply, err := stream.CloseAndRecv()
	return first(
		err,
		expect("bytes the server received", reply.GetReceivedBytes(), uint64(total)),
		expect("first wrong byte the server received, from 1", reply.GetFirstMismatch(), uint64(0)),
	)
}

func checkedServerStreaming(ctx context.Context, to target) error {
	request := asked(5, 10, 100_000, 0)
	request.Count = 50
	stream, err := checkedStub(to).Produce(ctx, request)
	if err != nil {
		return err
	}
	for number := uint32(0); number < request.Count; number++ {
		reply, err := stream.Recv()
		if err := first(err, right(reply, 1005+number, 100_000, 10, 0)); err != nil {
			return err
		}
	}
	_, err = stream.Recv()
	return expect("end", err, io.EOF)
}

func checkedPingPong(ctx context.Context, to target) error {
	stream, err := checkedStub(to).Exchange(ctx)
	if err != nil {
		return err
	}
	for seed, size := range checkedSizes {
		answer := checkedSizes[len(checkedSizes)-1-seed]
		if err := stream.Send(asked(uint32(seed), size, answer, 0)); err != nil {
			return err
		}
		reply, err := stream.Recv()
		if err := first(err, right(reply, uint32(seed)+1000, answer, size, 0)); err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	_, err = stream.Recv()
	return expect("end", err, io.EOF)
}

// The client ends its half first. The server must still send its replies.
func checkedHalfClose(ctx context.Context, to target) error {
	stream, err := checkedStub(to).Exchange(ctx)
	if err != nil {
		return err
	}
	for seed := uint32(0); seed < 20; seed++ {
		if err := stream.Send(asked(seed, 1000, 300_000, 0)); err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for seed := uint32(0); seed < 20; seed++ {
		reply, err := stream.Recv()
		if err := first(err, right(reply, seed+1000, 300_000, 1000, 0)); err != nil {
			return err
		}
	}
	_, err = stream.Recv()
	return expect("end", err, io.EOF)
}

func checkedConcurrent(ctx context.Context, to target) error {
	return atOnce(64, func(seed int) error { return bothWays(ctx, to, uint32(seed), 1000*seed, 2000*seed, 0) })
}

func checkedGzip(ctx context.Context, to target) error {
	for seed, size := range checkedSizes {
		if err := bothWays(ctx, to, uint32(seed), size, size, 100, grpc.UseCompressor(gzip.Name)); err != nil {
			return err
		}
	}
	return nil
}

func checkedBinaryMetadata(ctx context.Context, to target) error {
	every := make([]byte, 512)
	for at := range every {
		every[at] = byte(at)
	}
	return echoes(ctx, to, "a  b ~!", string(every))
}

func checkedLargeMetadata(ctx context.Context, to target) error {
	return echoes(ctx, to, strings.Repeat("0123456789abcdef", 180), string(content(9, 2000, 0)))
}

func checkedStatusDetails(ctx context.Context, to target) error {
	const message = "not found: Größe ☺"
	// google.rpc.Status: code, message, and a detail of a type that nobody knows.
	details := "\x08\x05\x12" + string(rune(len(message))) + message + "\x1a\x06\x0a\x01t\x12\x01\x00"
	var tail metadata.MD
	request := &checked.FailRequest{Code: int32(codes.NotFound), Message: message, Details: []byte(details)}
	_, err := checkedStub(to).Fail(ctx, request, grpc.Trailer(&tail))
	if err := first(refused(err, codes.NotFound), expect("message", status.Convert(err).Message(), message)); err != nil {
		return err
	}
	// The library hands `grpc-status-details-bin` out as the status, decoded.
	decoded, err := proto.Marshal(status.Convert(err).Proto())
	return first(
		err,
		expect("grpc-status-details-bin", fmt.Sprintf("%q", decoded), fmt.Sprintf("%q", details)),
		expect("x-checked-bin", fmt.Sprintf("%q", tail.Get("x-checked-bin")), fmt.Sprintf("%q", []string{details})),
	)
}
