package main

import (
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"io/ioutil"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// tlsFlags are the official programs' flags, and those that name files.
type tlsFlags struct {
	useTLS, useTestCA     bool
	override              string
	caFile                string
	certFile, keyFile     string
	clientCert, clientKey string
	clientCAFile          string
}

func (it *tlsFlags) add(flags *flag.FlagSet) {
	flags.BoolVar(&it.useTLS, "use_tls", false, "whether to use TLS")
	flags.BoolVar(&it.useTestCA, "use_test_ca", false, "client: trust the authority in --ca_file, not the system's")
	flags.StringVar(&it.override, "server_host_override", "", "client: the host that the server is asked to be")
	flags.StringVar(&it.caFile, "ca_file", "", "client: the authority's certificate")
	flags.StringVar(&it.clientCert, "client_cert_file", "", "client: its certificate, if it shows one")
	flags.StringVar(&it.clientKey, "client_key_file", "", "client: the certificate's key")
	flags.StringVar(&it.certFile, "cert_file", "", "server: its certificate")
	flags.StringVar(&it.keyFile, "key_file", "", "server: the certificate's key")
	flags.StringVar(&it.clientCAFile, "client_ca_file", "", "server: the authority of which clients have to show a certificate")
}

func authorities(flag, path string) (*x509.CertPool, error) {
	text, err := ioutil.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--%s: %v", flag, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("--%s: %s: no certificate in it", flag, path)
	}
	return pool, nil
}

func identity(certFlag, certFile, keyFlag, keyFile string) ([]tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, fmt.Errorf("--%s=%s --%s=%s: %v", certFlag, certFile, keyFlag, keyFile, err)
	}
	return []tls.Certificate{pair}, nil
}

// dial returns the options of a client's connections.
func (it *tlsFlags) dial() ([]grpc.DialOption, error) {
	if !it.useTLS {
		options := []grpc.DialOption{grpc.WithInsecure()}
		if it.override != "" {
			options = append(options, grpc.WithAuthority(it.override))
		}
		return options, nil
	}
	config := &tls.Config{ServerName: it.override}
	var err error
	if it.useTestCA {
		if config.RootCAs, err = authorities("ca_file", it.caFile); err != nil {
			return nil, err
		}
	}
	if it.clientCert != "" || it.clientKey != "" {
		config.Certificates, err = identity("client_cert_file", it.clientCert, "client_key_file", it.clientKey)
		if err != nil {
			return nil, err
		}
	}
	return []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(config))}, nil
}

// serve returns the options of a server.
func (it *tlsFlags) serve() ([]grpc.ServerOption, error) {
	if !it.useTLS {
		return nil, nil
	}
	config := &tls.Config{}
	var err error
	if config.Certificates, err = identity("cert_file", it.certFile, "key_file", it.keyFile); err != nil {
		return nil, err
	}
	if it.clientCAFile != "" {
		if config.ClientCAs, err = authorities("client_ca_file", it.clientCAFile); err != nil {
			return nil, err
		}
		config.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return []grpc.ServerOption{grpc.Creds(credentials.NewTLS(config))}, nil
}
