package main

import (
	"context"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"interop/testing"
)

// prefix is the length in bytes of the prefix of each message: a flag, and the message's length.
const prefix = 5

// arrivals notes for each message of a call that has arrived whether it was compressed.
type arrivals struct {
	mutex sync.Mutex
	came  []bool
}

func (it *arrivals) add(compressed bool) {
	it.mutex.Lock()
	defer it.mutex.Unlock()
	it.came = append(it.came, compressed)
}

// rest removes all notes, and returns them.
func (it *arrivals) rest() []bool {
	it.mutex.Lock()
	defer it.mutex.Unlock()
	came := it.came
	it.came = nil
	return came
}

type arrivalsKey struct{}

// observed returns a context for a call whose messages are noted as they arrive.
func observed(ctx context.Context) (context.Context, *arrivals) {
	came := &arrivals{}
	return context.WithValue(ctx, arrivalsKey{}, came), came
}

// acceptingGzip tells the server that the client accepts compressed replies. The library tells it only if it
// compresses the requests too.
func acceptingGzip(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "grpc-accept-encoding", "gzip")
}

// wire notes the messages of all calls as they arrive. The library does not show a message's flag, but its
// length on the wire and its length after decompression: if both are equal, the message counts as plain.
// (No message here keeps its length when it is compressed.)
type wire struct{}

func (wire) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	if _, found := ctx.Value(arrivalsKey{}).(*arrivals); !found {
		ctx, _ = observed(ctx)
	}
	return ctx
}

func (wire) HandleRPC(ctx context.Context, event stats.RPCStats) {
	message, isMessage := event.(*stats.InPayload)
	came, found := ctx.Value(arrivalsKey{}).(*arrivals)
	if isMessage && found {
		came.add(message.WireLength != message.Length+prefix)
	}
}

func (wire) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (wire) HandleConn(context.Context, stats.ConnStats) {}

// cameAsExpected fails unless the call's only new message is compressed, or plain, as the client says.
func cameAsExpected(ctx context.Context, expected *testing.BoolValue) error {
	came, found := ctx.Value(arrivalsKey{}).(*arrivals)
	if !found {
		return status.Error(codes.Internal, "the library shows no messages")
	}
	messages := came.rest()
	if len(messages) != 1 {
		return status.Errorf(codes.Internal, "a message has come, and the library shows %d", len(messages))
	}
	if expected != nil && expected.Value != messages[0] {
		return status.Errorf(codes.InvalidArgument, "compressed: expected %v, got %v", expected.Value, messages[0])
	}
	return nil
}
