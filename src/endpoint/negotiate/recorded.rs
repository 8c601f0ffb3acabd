//! The negotiation of version 3, as its last binary sent it: recorded bytes, and both of today's ends with a peer
//! that sends them. `cargo test -p tonic-rdma --lib recorded::print -- --ignored --nocapture` prints the bytes of
//! this binary.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::ops::Range;
use std::time::Duration;

use support::{Runtime, hex, unhex};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic_rdma_verbs::{PathSettings, QueuePair, QueuePairAddress};

use super::reach::{self, tests::queue_pair};
use super::{Dialer, Listener};
use crate::endpoint::config::{Config, Policy, Provider};
use crate::wire::hello::{ClientHello, Decoded, Message, NATIVE_CALLS};

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
        let mut hello = unhex(CLIENT_HELLO);
        let Ok(Decoded::Message { message: Message::ClientHello(read), .. }) = Message::decode(&hello) else {
            panic!("not understood: {hello:?}");
        };
        assert_eq!((read.capabilities, &*read.offers[0].device), (NATIVE_CALLS, "soft0"));
        let local = Message::ClientHello(ClientHello { identity: reach::local(), ..read }).encode().unwrap();
        hello[IDENTITY].copy_from_slice(&local[IDENTITY]);
        hello[OFFERED].copy_from_slice(ours.local_address().as_bytes());
        client.write_all(&hello).await.unwrap();
        let answer = message(&mut client).await;
        let read = connect(&*ours, &answer[ANSWERED]);
        assert_eq!(without(&answer, ANSWERED), without(&unhex(SERVER_HELLO), ANSWERED));
        let confirm = unhex(CONFIRMS[0]);
        client.write_all(&[&confirm[..17], &read].concat()).await.unwrap();
        let confirmed = message(&mut client).await;
        assert_eq!(confirmed[..17], unhex(CONFIRMS[1])[..17]);
        assert_eq!(confirmed[17..], ours.local().unwrap().probe().ours.unwrap().to_le_bytes());
        let server = listener.next_negotiated().await.unwrap();
        assert!(server.info().is_native(), "{}", server.info().reason());
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
        let same = |hello: &[u8]| without(&without(hello, OFFERED), IDENTITY);
        assert_eq!(same(&hello), same(&unhex(CLIENT_HELLO)));
        let read = connect(&*ours, &hello[OFFERED]);
        let mut answer = unhex(SERVER_HELLO);
        answer[ANSWERED].copy_from_slice(ours.local_address().as_bytes());
        server.write_all(&answer).await.unwrap();
        let confirmed = message(&mut server).await;
        assert_eq!(confirmed[..17], unhex(CONFIRMS[0])[..17]);
        assert_eq!(confirmed[17..], ours.local().unwrap().probe().ours.unwrap().to_le_bytes());
        server.write_all(&[&unhex(CONFIRMS[1])[..17], &read].concat()).await.unwrap();
        let client = dialled.await.unwrap();
        assert!(client.info().is_native(), "{}", client.info().reason());
    });
}

/// Returns the bytes with zeros in place of what differs from process to process.
fn without(bytes: &[u8], differs: Range<usize>) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[differs].fill(0);
    bytes
}

/// The client's process in its hello, and the address of its queue pair there and in the server's hello.
const IDENTITY: Range<usize> = 16..48;
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
