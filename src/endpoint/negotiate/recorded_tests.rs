//! The negotiation of version 3, as its last binary sent it: recorded bytes, and both of today's ends with a peer
//! that sends them. `cargo test -p tonic-rdma --lib recorded::print -- --ignored --nocapture` prints the bytes of
//! this binary.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

use std::ops::Range;
use std::time::Duration;

use support::{Runtime, hex, unhex};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic_rdma_verbs::unstable::Versions;
use tonic_rdma_verbs::{PathSettings, QueuePair, QueuePairAddress};

use super::reach::{self, tests::queue_pair};
use super::{Dialer, Listener};
use crate::endpoint::config::{Config, Policy, Provider};
use crate::endpoint::info::{RdmaConnectInfo, Verdict};
use crate::wire::hello::{ClientHello, Message, NATIVE_CALLS};

/// Reads one message.
async fn message(tcp: &mut TcpStream) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    tcp.read_exact(&mut bytes).await.unwrap();
    let length = u32::from_le_bytes(bytes[12..].try_into().unwrap());
    bytes.resize(16 + length as usize, 0);
    tcp.read_exact(&mut bytes[16..]).await.unwrap();
    bytes
}

/// Connects our queue pair to the peer's. Returns the value that was read there, which is the proof.
fn connect(ours: &dyn QueuePair, peer: &[u8]) -> [u8; 8] {
    ours.to_rtr(&QueuePairAddress::new(peer.to_vec()).unwrap(), &PathSettings::default()).unwrap();
    ours.local().unwrap().probe().peers.unwrap().to_le_bytes()
}

/// Returns the recorded hello, as a client in this process with this queue pair would send it.
fn hello_of(ours: &dyn QueuePair) -> Vec<u8> {
    let mut hello = unhex(CLIENT_HELLO);
    let Ok(Some((Message::ClientHello(read), _))) = Message::decode(&hello) else {
        panic!("not understood: {hello:?}");
    };
    assert_eq!((read.newest, read.capabilities, &*read.offers[0].device), (3, NATIVE_CALLS, "soft0"));
    let local = Message::ClientHello(ClientHello { identity: reach::local(), ..read }).encode().unwrap();
    hello[IDENTITY].copy_from_slice(&local[IDENTITY]);
    hello[OFFERED].copy_from_slice(ours.local_address().as_bytes());
    hello
}

fn config() -> Config {
    let long = Duration::from_secs(600);
    Config::default().policy(Policy::Require).provider(Provider::Soft).handshake_timeout(long)
}

async fn listen() -> Listener {
    let listener = Listener::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), config()).unwrap();
    listener.take_native_calls(true);
    listener
}

/// Prints what a client and a server of this binary send, through a relay.
#[test]
#[ignore = "prints the messages of this binary"]
fn print() {
    Runtime::CurrentThread.run(async {
        let (mut listener, relay) = (listen().await, TcpListener::bind("127.0.0.1:0").await.unwrap());
        let port = relay.local_addr().unwrap().port();
        let dialled = tokio::spawn(async move {
            Dialer::new(config()).dial_for_calls("127.0.0.1", port, None).await.unwrap()
        });
        let mut client = relay.accept().await.unwrap().0;
        let mut server = TcpStream::connect(listener.local_addr()).await.unwrap();
        for is_client in [true, false, true, false] {
            let (from, to) = if is_client { (&mut client, &mut server) } else { (&mut server, &mut client) };
            let bytes = message(from).await;
            to.write_all(&bytes).await.unwrap();
            println!("{}{}", if is_client { "client" } else { "server" }, hex(&bytes));
        }
        let (client, server) = (dialled.await.unwrap(), listener.next_negotiated().await.unwrap());
        assert!(client.info().is_native() && server.info().is_native());
    });
}

/// A client of version 3, against today's listener.
#[test]
fn a_client_of_version_3_gets_rdma() {
    Runtime::CurrentThread.run(async {
        let (mut listener, ours) = (listen().await, queue_pair());
        let mut client = TcpStream::connect(listener.local_addr()).await.unwrap();
        client.write_all(&hello_of(&*ours)).await.unwrap();
        let answer = message(&mut client).await;
        let read = connect(&*ours, &answer[ANSWERED]);
        assert_eq!(without(&answer, ANSWERED), without(&unhex(SERVER_HELLO), ANSWERED));
        let confirm = unhex(CONFIRMS[0]);
        client.write_all(&[&confirm[..17], &read].concat()).await.unwrap();
        let confirmed = message(&mut client).await;
        assert_eq!(confirmed[..17], unhex(CONFIRMS[1])[..17]);
        assert_eq!(confirmed[17..], ours.local().unwrap().probe().ours.unwrap().to_le_bytes());
        let server = listener.next_negotiated().await.unwrap();
        old_peer(server.info());
    });
}

/// A server of version 3, which today's client dials.
#[test]
fn a_server_of_version_3_gives_rdma() {
    Runtime::CurrentThread.run(async {
        let (listener, ours) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), queue_pair());
        let port = listener.local_addr().unwrap().port();
        let dialled = tokio::spawn(async move {
            Dialer::new(config()).dial_for_calls("127.0.0.1", port, None).await.unwrap()
        });
        let mut server = listener.accept().await.unwrap().0;
        let hello = message(&mut server).await;
        let mut same = unhex(CLIENT_HELLO);
        same[NEWEST] = 4; // where version 3 looks for no capability
        let common = |hello: &[u8]| without(&without(hello, OFFERED), IDENTITY);
        assert_eq!(common(&hello), common(&same));
        let read = connect(&*ours, &hello[OFFERED]);
        let mut answer = unhex(SERVER_HELLO);
        answer[ANSWERED].copy_from_slice(ours.local_address().as_bytes());
        server.write_all(&answer).await.unwrap();
        let confirmed = message(&mut server).await;
        assert_eq!(confirmed[..17], unhex(CONFIRMS[0])[..17]);
        assert_eq!(confirmed[17..], ours.local().unwrap().probe().ours.unwrap().to_le_bytes());
        server.write_all(&[&unhex(CONFIRMS[1])[..17], &read].concat()).await.unwrap();
        let client = dialled.await.unwrap();
        old_peer(client.info());
    });
}

/// Checks the reason and the version of a connection to a peer of version 3.
fn old_peer(info: &RdmaConnectInfo) {
    let said = "; the peer speaks version 3 of the protocol, this end 3 to 4";
    assert!(info.is_native() && info.reason().contains(said), "{}", info.reason());
    assert_eq!(info.version(), Some(3));
}

/// Ends of all versions from the last one on, also of versions to come.
#[test]
fn ends_use_the_newest_version_that_both_speak_and_without_one_tcp() {
    Runtime::CurrentThread.run(async {
        let ends: [Versions; 4] =
            [(3, 3), (3, 4), (4, 5), (5, 6)].map(|(oldest, newest)| Versions { oldest, newest });
        for server in ends {
            for client in ends {
                let config = config().policy(Policy::Prefer);
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let mut listener = Listener::speaking(listener, config.clone(), server).unwrap();
                listener.take_native_calls(true);
                let mut dialer = Dialer::new(config);
                dialer.speaks = client;
                let port = listener.local_addr().port();
                let dialled = dialer.dial_for_calls("127.0.0.1", port, None);
                let (dialled, accepted) = tokio::join!(dialled, listener.next_negotiated());
                let (dialled, accepted) = (dialled.unwrap(), accepted.unwrap());
                let both = client.newest.min(server.newest);
                let agreed = (both >= client.oldest.max(server.oldest)).then_some(both);
                for info in [dialled.info(), accepted.info()] {
                    let case = format!("client {client}, server {server}: {}", info.reason());
                    assert_eq!((info.version(), info.is_native()), (agreed, agreed.is_some()), "{case}");
                    if agreed.is_none() {
                        let (old, new) =
                            if client.newest == both { (client, server) } else { (server, client) };
                        let said =
                            format!("the peer speaks version {} of the protocol, this end {new}", old.newest);
                        assert!(info.reason().contains(&said), "{case}");
                    }
                }
            }
        }
    });
}

/// The software devices of both ends have versions of their own.
#[test]
fn a_device_of_another_version_leads_to_tcp_and_the_reason_has_both_numbers() {
    Runtime::CurrentThread.run(async {
        let ours = queue_pair();
        let own = ours.local_address().as_bytes()[1];
        for version in [0, own - 1, own + 1] {
            let said = format!("has version {version} of the layout, this one has {own}");
            let bind = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
            let config = config().policy(Policy::Prefer);

            let mut listener = Listener::new(bind().await, config.clone()).unwrap();
            listener.take_native_calls(true);
            let mut client = TcpStream::connect(listener.local_addr()).await.unwrap();
            let mut hello = hello_of(&*ours);
            hello[OFFERED.start + 1] = version;
            client.write_all(&hello).await.unwrap();
            let answer = message(&mut client).await;
            assert!(answer[16] == 0 && String::from_utf8_lossy(&answer).contains(&said), "{answer:?}");
            let stream = listener.next_negotiated().await.unwrap();
            assert_eq!(stream.info().verdict(), Verdict::Tcp, "{}", stream.info().reason());

            let server = bind().await;
            let port = server.local_addr().unwrap().port();
            let dialled = tokio::spawn(async move { Dialer::new(config).dial("127.0.0.1", port).await });
            let mut server = server.accept().await.unwrap().0;
            message(&mut server).await;
            let mut answer = unhex(SERVER_HELLO);
            answer[ANSWERED.start + 1] = version;
            // No native calls, because the client asked for none.
            let capabilities = answer.len() - 4;
            answer[capabilities] = 0;
            server.write_all(&answer).await.unwrap();
            let failed = message(&mut server).await;
            assert!(failed[16] == 0 && String::from_utf8_lossy(&failed).contains(&said), "{failed:?}");
            let stream = dialled.await.unwrap().unwrap();
            assert_eq!(stream.info().verdict(), Verdict::Tcp);
            assert!(stream.info().reason().contains(&said), "{}", stream.info().reason());
        }
    });
}

/// A newer client appends to its hello what this end does not know.
#[test]
fn a_longer_hello_of_a_newer_client_is_answered() {
    Runtime::CurrentThread.run(async {
        let (listener, ours) = (listen().await, queue_pair());
        let mut hello = hello_of(&*ours);
        hello[NEWEST] = 5;
        hello.extend([7; 100]);
        hello[12] += 100;
        let mut client = TcpStream::connect(listener.local_addr()).await.unwrap();
        client.write_all(&hello).await.unwrap();
        let answer = message(&mut client).await;
        assert_eq!((answer[17], answer.last()), (0, Some(&4)), "accepted, with version 4: {answer:?}");
    });
}

/// A server that answers with a version that the client does not speak gets no bytes of that version.
#[test]
fn an_answer_with_a_newer_version_is_refused() {
    Runtime::CurrentThread.run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let dialled = tokio::spawn(async move { Dialer::new(config()).dial("127.0.0.1", port).await });
        let mut server = listener.accept().await.unwrap().0;
        message(&mut server).await;
        let mut answer = unhex(SERVER_HELLO);
        *answer.last_mut().unwrap() = 5;
        server.write_all(&answer).await.unwrap();
        let error = dialled.await.unwrap().unwrap_err().to_string();
        assert!(error.contains("a version not spoken here"), "{error}");
    });
}

/// Returns the bytes with zeros in place of what differs from process to process.
fn without(bytes: &[u8], differs: Range<usize>) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[differs].fill(0);
    bytes
}

/// The client's process in its hello, its newest version, and the address of its queue pair there and in the
/// server's hello.
const IDENTITY: Range<usize> = 16..48;
const NEWEST: usize = 51;
const OFFERED: Range<usize> = 68..102;
const ANSWERED: Range<usize> = 20..54;

const CLIENT_HELLO: &str = "
d5746f6e52444d41030001005e0000001b85d98d547a4046aa9d7ebfb6012f9a
f9ffffef00000000000000009f21000001000000010400736f66740500736f66
7430220073059f2100003f59008f30e2ea71010000003eecfa5cb1fb99ac0000
0000000000006000000000440000";
const SERVER_HELLO: &str = "
d5746f6e52444d4103000200320000000100220073059f2100003f59008f30e2
ea710200000088514e6322b79e89000000000000000060000000004400000100
0000";
/// The confirmations of client and server. The last eight bytes of each are a random number.
const CONFIRMS: [&str; 2] = [
    "d5746f6e52444d4103000300090000000275d59d5bc1c77339",
    "d5746f6e52444d4103000300090000000209374b10690b9d84",
];
