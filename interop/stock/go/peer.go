// A gRPC peer on grpc-go, with the flags of gRPC's official interop programs (see interop/README.md).
//
//	peer server --port=PORT
//	peer client --server_host=HOST --server_port=PORT --test_case=NAME[,NAME...]
//	peer client --list
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
)

const limit = 30 * time.Second

func main() {
	if len(os.Args) < 2 {
		fail(fmt.Errorf("server or client?"))
	}
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	port := flags.Int("port", 0, "port to listen on")
	host := flags.String("server_host", "127.0.0.1", "host to connect to")
	serverPort := flags.Int("server_port", 0, "port to connect to")
	var security tlsFlags
	security.add(flags)
	cases := flags.String("test_case", "", "cases to run")
	list := flags.Bool("list", false, "list the cases")
	flags.Parse(os.Args[2:])
	switch {
	case os.Args[1] == "server":
		fail(serve(*port, security))
	case os.Args[1] != "client":
		fail(fmt.Errorf("server or client, not %q", os.Args[1]))
	case *list:
		for _, it := range table {
			fmt.Println(it.name)
		}
	default:
		options, err := security.dial()
		if err != nil {
			fail(err)
		}
		os.Exit(run(server{fmt.Sprintf("%s:%d", *host, *serverPort), options}, strings.Split(*cases, ",")))
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "peer:", err)
	os.Exit(2)
}

func run(to server, names []string) int {
	failed := 0
	for _, name := range names {
		outcome := one(to, name)
		fmt.Println(name, outcome)
		if strings.HasPrefix(outcome, "failed") {
			failed = 1
		}
	}
	return failed
}

func one(to server, name string) string {
	for _, it := range table {
		if it.name == name {
			return outcome(to, it.run)
		}
	}
	if reason, found := cannot[name]; found {
		return "skipped: " + reason
	}
	return "skipped: this peer does not have the case"
}

func outcome(to server, run func(context.Context, target) error) string {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- connected(ctx, to, run) }()
	select {
	case err := <-done:
		if err != nil {
			return "failed: " + strings.Join(strings.Fields(err.Error()), " ")
		}
		return "ok"
	// The calls of the case have the shorter limit, because their errors say more.
	case <-time.After(limit + time.Second):
		return fmt.Sprintf("failed: not done after %v", limit)
	}
}

// server is the address of a server, and the options of connections to it.
type server struct {
	address string
	options []grpc.DialOption
}

// target is a server to call: an open connection, and what a further connection needs.
type target struct {
	*grpc.ClientConn
	server
}

func connected(ctx context.Context, to server, run func(context.Context, target) error) error {
	size := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(largest), grpc.MaxCallSendMsgSize(largest))
	connection, err := grpc.DialContext(ctx, to.address, append([]grpc.DialOption{grpc.WithNoProxy(), size, grpc.WithStatsHandler(wire{})}, to.options...)...)
	if err != nil {
		return err
	}
	defer connection.Close()
	return run(ctx, target{connection, to})
}
