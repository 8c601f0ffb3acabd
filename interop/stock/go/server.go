package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/golang/protobuf/proto"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"interop/checked"
	"interop/testing"
)

const (
	largest      = 64 << 20
	echoInitial  = "x-grpc-test-echo-initial"
	echoTrailing = "x-grpc-test-echo-trailing-bin"
)

func serve(port int, security tlsFlags) error {
	options, err := security.serve()
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	server := grpc.NewServer(append(options, grpc.MaxRecvMsgSize(largest), grpc.MaxSendMsgSize(largest), grpc.StatsHandler(wire{}))...)
	testing.RegisterTestServiceServer(server, testService{})
	checked.RegisterCheckedServer(server, checkedService{})
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	return server.Serve(listener)
}

// testService is gRPC's test service.
type testService struct {
	testing.UnimplementedTestServiceServer
}

func payload(size int32) (*testing.Payload, error) {
	if size < 0 || size > largest {
		return nil, status.Errorf(codes.InvalidArgument, "a payload of %d bytes was asked for", size)
	}
	return &testing.Payload{Body: make([]byte, size)}, nil
}

// echoed returns the metadata of a call that the server has to send back.
func echoed(ctx context.Context) (initial, trailing metadata.MD) {
	initial, trailing = metadata.MD{}, metadata.MD{}
	sent, _ := metadata.FromIncomingContext(ctx)
	initial.Append(echoInitial, sent.Get(echoInitial)...)
	trailing.Append(echoTrailing, sent.Get(echoTrailing)...)
	return initial, trailing
}

func echoStatus(asked *testing.EchoStatus) error {
	if asked == nil {
		return nil
	}
	return status.Error(codes.Code(asked.Code), asked.Message)
}

func (testService) EmptyCall(context.Context, *testing.Empty) (*testing.Empty, error) {
	return &testing.Empty{}, nil
}

func (testService) UnaryCall(ctx context.Context, request *testing.SimpleRequest) (*testing.SimpleResponse, error) {
	initial, trailing := echoed(ctx)
	grpc.SetHeader(ctx, initial)
	grpc.SetTrailer(ctx, trailing)
	if err := cameAsExpected(ctx, request.ExpectCompressed); err != nil {
		return nil, err
	}
	if err := echoStatus(request.ResponseStatus); err != nil {
		return nil, err
	}
	payload, err := payload(request.ResponseSize)
	return &testing.SimpleResponse{Payload: payload}, err
}

// CacheableUnaryCall answers with the time, as the official servers do, so that a reply from a cache can be
// recognised.
func (testService) CacheableUnaryCall(ctx context.Context, _ *testing.SimpleRequest) (*testing.SimpleResponse, error) {
	grpc.SetHeader(ctx, metadata.Pairs("cache-control", "max-age=60, public"))
	now := []byte(fmt.Sprint(time.Now().UnixNano()))
	return &testing.SimpleResponse{Payload: &testing.Payload{Body: now}}, nil
}

type outputs interface {
	Send(*testing.StreamingOutputCallResponse) error
}

func reply(request *testing.StreamingOutputCallRequest, stream outputs) error {
	for _, asked := range request.ResponseParameters {
		if interval := time.Duration(asked.IntervalUs) * time.Microsecond; interval > 0 && interval < time.Minute {
			time.Sleep(interval)
		}
		payload, err := payload(asked.Size)
		if err == nil {
			err = stream.Send(&testing.StreamingOutputCallResponse{Payload: payload})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (testService) StreamingOutputCall(request *testing.StreamingOutputCallRequest, stream testing.TestService_StreamingOutputCallServer) error {
	return reply(request, stream)
}

func (testService) StreamingInputCall(stream testing.TestService_StreamingInputCallServer) error {
	var total int32
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			return stream.SendAndClose(&testing.StreamingInputCallResponse{AggregatedPayloadSize: total})
		}
		if err == nil {
			err = cameAsExpected(stream.Context(), request.ExpectCompressed)
		}
		if err != nil {
			return err
		}
		total += int32(len(request.GetPayload().GetBody()))
	}
}

func (testService) FullDuplexCall(stream testing.TestService_FullDuplexCallServer) error {
	initial, trailing := echoed(stream.Context())
	stream.SetHeader(initial)
	stream.SetTrailer(trailing)
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = echoStatus(request.ResponseStatus)
		}
		if err == nil {
			err = reply(request, stream)
		}
		if err != nil {
			return err
		}
	}
}

func (testService) HalfDuplexCall(stream testing.TestService_HalfDuplexCallServer) error {
	var requests []*testing.StreamingOutputCallRequest
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		requests = append(requests, request)
	}
	for _, request := range requests {
		if err := reply(request, stream); err != nil {
			return err
		}
	}
	return nil
}

// checkedService has the calls whose content is checked.
type checkedService struct {
	checked.UnimplementedCheckedServer
}

func checkedReply(request *checked.CheckedRequest, number uint32) (*checked.CheckedReply, error) {
	if request.ReplyBytes > largest {
		return nil, status.Errorf(codes.InvalidArgument, "a reply of %d bytes was asked for", request.ReplyBytes)
	}
	seed := request.ReplySeed + number
	return &checked.CheckedReply{
		Seed:          seed,
		Payload:       content(seed, int(request.ReplyBytes), request.Period),
		ReceivedBytes: uint64(len(request.Payload)),
		FirstMismatch: firstMismatch(request.Seed, request.Payload, request.Period),
	}, nil
}

func (checkedService) Unary(_ context.Context, request *checked.CheckedRequest) (*checked.CheckedReply, error) {
	return checkedReply(request, 0)
}

func (checkedService) Collect(stream checked.Checked_CollectServer) error {
	total := &checked.CheckedReply{}
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			return stream.SendAndClose(total)
		}
		if err != nil {
			return err
		}
		next, err := checkedReply(request, 0)
		if err != nil {
			return err
		}
		next.ReceivedBytes += total.ReceivedBytes
		if total.FirstMismatch != 0 {
			next.FirstMismatch = total.FirstMismatch
		}
		total = next
	}
}

func (checkedService) Produce(request *checked.CheckedRequest, stream checked.Checked_ProduceServer) error {
	for number := uint32(0); number < request.Count; number++ {
		reply, err := checkedReply(request, number)
		if err == nil {
			err = stream.Send(reply)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (checkedService) Exchange(stream checked.Checked_ExchangeServer) error {
	for {
		request, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		reply, err := checkedReply(request, 0)
		if err == nil {
			err = stream.Send(reply)
		}
		if err != nil {
			return err
		}
	}
}

func (checkedService) Fail(ctx context.Context, request *checked.FailRequest) (*checked.CheckedReply, error) {
	grpc.SetTrailer(ctx, metadata.Pairs("x-checked-bin", string(request.Details)))
	// The library keeps `grpc-status-details-bin` to itself, and fills it from the status.
	details := &spb.Status{}
	if err := proto.Unmarshal(request.Details, details); err != nil {
		return nil, status.Error(codes.Code(request.Code), request.Message)
	}
	details.Code, details.Message = request.Code, request.Message
	return nil, status.ErrorProto(details)
}
