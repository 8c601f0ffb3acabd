package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"interop/testing"
)

type namedCase struct {
	name string
	run  func(context.Context, target) error
}

// table has the cases, by name. Each returns the fault of the server as an error.
var table = append([]namedCase{
	{"empty_unary", emptyUnary},
	{"cacheable_unary", cacheableUnary},
	{"large_unary", largeUnary},
	{"client_compressed_unary", clientCompressedUnary},
	{"server_compressed_unary", serverCompressedUnary},
	{"client_streaming", clientStreaming},
	{"server_streaming", serverStreaming},
	{"server_compressed_streaming", serverCompressedStreaming},
	{"ping_pong", pingPong},
	{"empty_stream", emptyStream},
	{"custom_metadata", customMetadata},
	{"status_code_and_message", statusCodeAndMessage},
	{"special_status_message", specialStatusMessage},
	{"unimplemented_method", unimplementedMethod},
	{"unimplemented_service", unimplementedService},
	{"cancel_after_begin", cancelAfterBegin},
	{"cancel_after_first_response", cancelAfterFirstResponse},
	{"timeout_on_sleeping_server", timeoutOnSleepingServer},
	{"concurrent_large_unary", concurrentLargeUnary},
	{"rpc_soak", rpcSoak},
	{"channel_soak", channelSoak},
}, checkedCases...)

var cannot = map[string]string{
	"client_compressed_streaming": "grpc-go can't leave out compression for one message of a client's stream",
	"checked_zstd":                "grpc-go has no zstd",
}

var sizes = []struct{ request, reply int32 }{{27182, 31415}, {8, 9}, {1828, 2653}, {45904, 58979}}

func zeros(size int32) *testing.Payload {
	return &testing.Payload{Body: make([]byte, size)}
}

func zerosCame(payload *testing.Payload, size int32) error {
	if !bytes.Equal(payload.GetBody(), make([]byte, size)) {
		return fmt.Errorf("expected %d zeros, got %d bytes", size, len(payload.GetBody()))
	}
	return nil
}

func expect(what string, got, wanted interface{}) error {
	if got != wanted {
		return fmt.Errorf("%s: expected %v, got %v", what, wanted, got)
	}
	return nil
}

// refused fails unless the call ended with the status `code`.
func refused(err error, code codes.Code) error {
	if status.Code(err) != code {
		return fmt.Errorf("expected status %v, got %v", code, err)
	}
	return nil
}

// first returns the first error, if there is one.
func first(errors ...error) error {
	for _, err := range errors {
		if err != nil {
			return err
		}
	}
	return nil
}

func stub(to target) testing.TestServiceClient { return testing.NewTestServiceClient(to) }

func large() *testing.SimpleRequest {
	return &testing.SimpleRequest{ResponseSize: 314159, Payload: zeros(271828)}
}

func exchange(request, reply int32) *testing.StreamingOutputCallRequest {
	parameters := []*testing.ResponseParameters{{Size: reply}}
	return &testing.StreamingOutputCallRequest{Payload: zeros(request), ResponseParameters: parameters}
}

func emptyUnary(ctx context.Context, to target) error {
	_, err := stub(to).EmptyCall(ctx, &testing.Empty{})
	return err
}

// No cache is between client and server, so the calls have to succeed, but may have different content.
func cacheableUnary(ctx context.Context, to target) error {
	ctx = metadata.AppendToOutgoingContext(ctx, "x-user-ip", "1.2.3.4")
	for n := 0; n < 2; n++ {
		if _, err := stub(to).CacheableUnaryCall(ctx, &testing.SimpleRequest{Payload: zeros(1)}); err != nil {
			return err
		}
	}
	return nil
}

func largeUnary(ctx context.Context, to target) error {
	reply, err := stub(to).UnaryCall(ctx, large())
	return first(err, zerosCame(reply.GetPayload(), 314159))
}

func clientCompressedUnary(ctx context.Context, to target) error {
	request := large()
	request.ExpectCompressed = &testing.BoolValue{Value: true}
	_, err := stub(to).UnaryCall(ctx, request)
	if err := refused(err, codes.InvalidArgument); err != nil {
		return err
	}
	reply, err := stub(to).UnaryCall(ctx, request, grpc.UseCompressor(gzip.Name))
	if err := first(err, zerosCame(reply.GetPayload(), 314159)); err != nil {
		return err
	}
	request.ExpectCompressed.Value = false
	reply, err = stub(to).UnaryCall(ctx, request)
	return first(err, zerosCame(reply.GetPayload(), 314159))
}

func serverCompressedUnary(ctx context.Context, to target) error {
	for _, compressed := range []bool{true, false} {
		request := large()
		request.ResponseCompressed = &testing.BoolValue{Value: compressed}
		ctx, came := observed(acceptingGzip(ctx))
		reply, err := stub(to).UnaryCall(ctx, request)
		err = first(err, zerosCame(reply.GetPayload(), 314159), expect("compressed", fmt.Sprint(came.rest()), fmt.Sprint([]bool{compressed})))
		if err != nil {
			return err
		}
	}
	return nil
}

func clientStreaming(ctx context.Context, to target) error {
	stream, err := stub(to).StreamingInputCall(ctx)
	if err != nil {
		return err
	}
	for _, size := range sizes {
		if err := stream.Send(&testing.StreamingInputCallRequest{Payload: zeros(size.request)}); err != nil {
			return err
		}
	}
	reply, err := stream.CloseAndRecv()
	return first(err, expect("bytes received", reply.GetAggregatedPayloadSize(), int32(74922)))
}

func serverStreaming(ctx context.Context, to target) error {
	request := &testing.StreamingOutputCallRequest{}
	for _, size := range sizes {
		request.ResponseParameters = append(request.ResponseParameters, &testing.ResponseParameters{Size: size.reply})
	}
	stream, err := stub(to).StreamingOutputCall(ctx, request)
	if err != nil {
		return err
	}
	for _, size := range sizes {
		reply, err := stream.Recv()
		if err := first(err, zerosCame(reply.GetPayload(), size.reply)); err != nil {
			return err
		}
	}
	_, err = stream.Recv()
	return expect("end", err, io.EOF)
}

func serverCompressedStreaming(ctx context.Context, to target) error {
	request := &testing.StreamingOutputCallRequest{ResponseParameters: []*testing.ResponseParameters{
		{Size: 31415, Compressed: &testing.BoolValue{Value: true}},
		{Size: 92653, Compressed: &testing.BoolValue{Value: false}},
	}}
	ctx, came := observed(acceptingGzip(ctx))
	stream, err := stub(to).StreamingOutputCall(ctx, request)
	if err != nil {
		return err
	}
	for _, asked := range request.ResponseParameters {
		reply, err := stream.Recv()
		if err := first(err, zerosCame(reply.GetPayload(), asked.Size)); err != nil {
			return err
		}
	}
	_, err = stream.Recv()
	return first(expect("end", err, io.EOF), expect("compressed", fmt.Sprint(came.rest()), fmt.Sprint([]bool{true, false})))
}

func pingPong(ctx context.Context, to target) error {
	stream, err := stub(to).FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	for _, size := range sizes {
		if err := stream.Send(exchange(size.request, size.reply)); err != nil {
			return err
		}
		reply, err := stream.Recv()
		if err := first(err, zerosCame(reply.GetPayload(), size.reply)); err != nil {
			return err
		}
	}
	return ended(stream)
}

// ended closes the client's half, and fails if the server sends anything more.
func ended(stream testing.TestService_FullDuplexCallClient) error {
	if err := stream.CloseSend(); err != nil {
		return err
	}
	_, err := stream.Recv()
	return expect("end", err, io.EOF)
}

func emptyStream(ctx context.Context, to target) error {
	stream, err := stub(to).FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	return ended(stream)
}

func customMetadata(ctx context.Context, to target) error {
	return echoes(ctx, to, "test_initial_metadata_value", "\xab\xab\xab")
}

func echoes(ctx context.Context, to target, initial, trailing string) error {
	ctx = metadata.AppendToOutgoingContext(ctx, echoInitial, initial, echoTrailing, trailing)
	var head, tail metadata.MD
	_, err := stub(to).UnaryCall(ctx, &testing.SimpleRequest{}, grpc.Header(&head), grpc.Trailer(&tail))
	if err := first(err, cameBack(head, tail, initial, trailing)); err != nil {
		return err
	}
	stream, err := stub(to).FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	if err := first(stream.Send(exchange(1, 1)), stream.CloseSend()); err != nil {
		return err
	}
	if head, err = stream.Header(); err != nil {
		return err
	}
	for err == nil {
		_, err = stream.Recv()
	}
	return first(expect("end", err, io.EOF), cameBack(head, stream.Trailer(), initial, trailing))
}

func cameBack(head, tail metadata.MD, initial, trailing string) error {
	return first(
		expect("initial metadata", fmt.Sprintf("%q", head.Get(echoInitial)), fmt.Sprintf("%q", []string{initial})),
		expect("trailing metadata", fmt.Sprintf("%q", tail.Get(echoTrailing)), fmt.Sprintf("%q", []string{trailing})),
	)
}

func echoesStatus(ctx context.Context, to target, message string) error {
	asked := &testing.EchoStatus{Code: int32(codes.Unknown), Message: message}
	_, err := stub(to).UnaryCall(ctx, &testing.SimpleRequest{ResponseStatus: asked})
	return first(refused(err, codes.Unknown), expect("message", status.Convert(err).Message(), message))
}

func statusCodeAndMessage(ctx context.Context, to target) error {
	const message = "test status message"
	if err := echoesStatus(ctx, to, message); err != nil {
		return err
	}
	stream, err := stub(to).FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	asked := &testing.EchoStatus{Code: int32(codes.Unknown), Message: message}
	if err := stream.Send(&testing.StreamingOutputCallRequest{ResponseStatus: asked}); err != nil {
		return err
	}
	_, err = stream.Recv()
	return first(refused(err, codes.Unknown), expect("message", status.Convert(err).Message(), message))
}

func specialStatusMessage(ctx context.Context, to target) error {
	return echoesStatus(ctx, to, "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n")
}

func unimplementedMethod(ctx context.Context, to target) error {
	_, err := stub(to).UnimplementedCall(ctx, &testing.Empty{})
	return refused(err, codes.Unimplemented)
}

func unimplementedService(ctx context.Context, to target) error {
	_, err := testing.NewUnimplementedServiceClient(to).UnimplementedCall(ctx, &testing.Empty{})
	return refused(err, codes.Unimplemented)
}

func cancelAfterBegin(ctx context.Context, to target) error {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := stub(to).StreamingInputCall(ctx)
	if err != nil {
		return err
	}
	cancel()
	_, err = stream.CloseAndRecv()
	return refused(err, codes.Canceled)
}

func cancelAfterFirstResponse(ctx context.Context, to target) error {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := stub(to).FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(exchange(27182, 31415)); err != nil {
		return err
	}
	reply, err := stream.Recv()
	cancel()
	if err := first(err, zerosCame(reply.GetPayload(), 31415)); err != nil {
		return err
	}
	_, err = stream.Recv()
	return refused(err, codes.Canceled)
}

func timeoutOnSleepingServer(ctx context.Context, to target) error {
	ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	stream, err := stub(to).FullDuplexCall(ctx)
	if err != nil {
		return refused(err, codes.DeadlineExceeded)
	}
	// The deadline may have passed by now.
	_ = stream.Send(&testing.StreamingOutputCallRequest{Payload: zeros(27182)})
	_, err = stream.Recv()
	return refused(err, codes.DeadlineExceeded)
}

// atOnce makes `count` calls at the same time.
func atOnce(count int, call func(number int) error) error {
	results := make(chan error, count)
	for number := 0; number < count; number++ {
		go func(number int) { results <- call(number) }(number)
	}
	for n := 0; n < count; n++ {
		if err := <-results; err != nil {
			return err
		}
	}
	return nil
}

func concurrentLargeUnary(ctx context.Context, to target) error {
	return atOnce(100, func(int) error { return largeUnary(ctx, to) })
}

const soakThreads, soakIterations = 4, 25

func rpcSoak(ctx context.Context, to target) error {
	return soak(func() error { return largeUnary(ctx, to) })
}

func channelSoak(ctx context.Context, to target) error {
	return soak(func() error { return connected(ctx, to.server, largeUnary) })
}

func soak(call func() error) error {
	return atOnce(soakThreads, func(int) error {
		for n := 0; n < soakIterations; n++ {
			if err := call(); err != nil {
				return err
			}
		}
		return nil
	})
}
