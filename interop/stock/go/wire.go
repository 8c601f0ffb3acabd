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

// prefix is the length of what stands in front of each message: a flag, and the message's length.
const prefix = 5

// arrivals has for each message that came whether it was compressed.
type arrivals struct {
	mutex sync.Mutex
	came  []bool
}

func (it *arrivals) add(compressed bool) {
	it.mutex.Lock()
	defer it.mutex.Unlock()
	it.came = append(it.came, compressed)
}

// rest takes all messages that were not asked for yet.
func (it *arrivals) rest() []bool {
	it.mutex.Lock()
	defer it.mutex.Unlock()
	came := it.came
	it.came = nil
	return came
}

type arrivalsKey struct{}

// observed is a context for a call whose messages are to be looked at as they come.
func observed(ctx context.Context) (context.Context, *arrivals) {
	came := &arrivals{}
	return context.WithValue(ctx, arrivalsKey{}, came), came
}

// acceptingGzip has the server know that the client takes compressed replies. The library says that only if it compresses
// the requests too.
func acceptingGzip(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "grpc-accept-encoding", "gzip")
}

// wire sees the messages of all calls as they come. The library shows no flag, but a message's length on the wire, and that of
// what is in it: where they are the same, the message is plain. A message that compression leaves as long as it was would
// count as plain; none is here.
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

// cameAsExpected fails if the call's last message did not come as the client says that it was sent.
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
