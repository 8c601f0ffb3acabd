//! A listener under connections that say nothing, and under negotiations that stop in the middle: other
//! clients get through at once, RDMA peers get RDMA, and the listener's descriptors, tasks and memory stay
//! within their bounds.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Handle;
use tokio_stream::StreamExt as _;
use tonic_rdma::unstable::wire::hello::{ClientHello, Message};
use tonic_rdma::{Config, Dialer, EagerThreshold, EndpointStream, Listener, Verdict};

use support::{
    Child, OpenCopy, Runtime, Silence, SilentDevice, announce, descriptors_and_mappings, listen, until,
};

/// More connections than a listener negotiates with at a time.
const SILENT: usize = 1500;
/// Most negotiations of a listener at a time.
const NEGOTIATIONS: usize = 1024;
/// Descriptors and tasks of the test itself.
const SLACK: usize = 40;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Returns settings that wait for the peer's part of the negotiation for longer than the test takes.
fn patient() -> Config {
    Config::default().handshake_timeout(Duration::from_secs(600)).eager_threshold(EagerThreshold::Bytes(4096))
}

/// Runs in a child, because each connection has both of its descriptors in one process.
fn in_a_child(role: &str) {
    let child = Child::start(&["sh", "-c", r#"ulimit -n 8192; exec "$0" "$@""#], role);
    assert_eq!(child.word, "served");
    child.ends();
}

#[test]
fn silent_connections_of_one_address_keep_no_client_out() {
    in_a_child("silent 1");
}

#[test]
fn silent_connections_of_many_addresses_keep_no_client_out() {
    in_a_child("silent 250");
}

async fn connect_from(source: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((source, 0).into()).unwrap();
    socket.connect(to).await.unwrap()
}

/// Plays the role `silent`: `sources` addresses hold silent connections.
pub(crate) fn play_silent(sources: usize) {
    Runtime::Idle.run(async move {
        let mut listener = listen(patient()).await;
        let address = listener.local_addr();
        serves(&mut listener).await;
        let (descriptors, _) = descriptors_and_mappings();
        let tasks = Handle::current().metrics().num_alive_tasks();
        // The only connection of its address.
        let alone = connect_from([127, 0, 1, 1], address).await;
        let mut silent = Vec::new();
        for number in 0..SILENT {
            silent.push(connect_from([127, 0, 0, 1 + (number % sources) as u8], address).await);
        }
        for _ in 0..3 {
            serves(&mut listener).await;
        }
        let here = descriptors_and_mappings().0 - descriptors - SILENT;
        assert!(here <= NEGOTIATIONS + SLACK, "the listener holds {here} connections");
        let tasks = Handle::current().metrics().num_alive_tasks() - tasks;
        assert!(tasks <= NEGOTIATIONS + SLACK, "the listener has {tasks} tasks");
        let closed =
            || silent.iter().filter(|tcp| tcp.try_read(&mut [0]).is_ok_and(|count| count == 0)).count();
        // The kernel of a busy machine may deliver the end of a connection late.
        until(|| closed() >= SILENT - NEGOTIATIONS).await;
        if sources == 1 {
            let end = alone.try_read(&mut [0]);
            assert!(end.is_err(), "the only connection of an address made room for the address with most");
        }
    });
    announce("served");
}

/// Checks that a stock client and an RDMA peer get through.
async fn serves(listener: &mut Listener) {
    let mut stock = TcpStream::connect(listener.local_addr()).await.unwrap();
    stock.write_all(PREFACE).await.unwrap();
    let mut stream = accept(listener, stock.local_addr().unwrap()).await;
    assert_eq!(stream.info().verdict(), Verdict::Tcp);
    stream.read_exact(&mut [0; PREFACE.len()]).await.unwrap();
    let dialer = Dialer::new(patient());
    let mut client = dialer.dial("127.0.0.1", listener.local_addr().port()).await.unwrap();
    assert_eq!(client.info().verdict(), Verdict::Rdma, "{}", client.info().reason());
    let mut server = accept(listener, client.info().local_addr()).await;
    assert_eq!(server.info().verdict(), Verdict::Rdma, "{}", server.info().reason());
    client.write_all(b"bytes").await.unwrap();
    client.flush().await.unwrap();
    server.read_exact(&mut [0; 5]).await.unwrap();
}

/// Returns the connection of the client at `peer`. Fails long before a silent connection's time is over.
async fn accept(listener: &mut Listener, peer: SocketAddr) -> EndpointStream {
    let accepted = async {
        loop {
            let stream = listener.next().await.unwrap();
            if stream.info().peer_addr() == peer {
                return stream;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), accepted).await.expect("the listener is shut")
}

/// The clients' negotiations stop after the server's answer, when the server has a queue pair and memory for
/// each of them. The server's limit on memory has room for few connections beside the stated bound of
/// unfinished negotiations.
#[test]
fn negotiations_that_stop_after_the_offer_leave_memory_for_others() {
    in_a_child("half-open");
}

/// Most negotiations of a listener that hold RDMA resources.
const PREPARED: u64 = 64;
const HALF_OPEN: usize = 300;
const RING: u64 = 96 * (17 << 10);

/// Plays the role `half-open`: the server, whose limit on memory counts. The clients are in another process.
pub(crate) fn play_half_open() {
    // The limit leaves a quarter to unfinished negotiations.
    let config = patient().pinned_limit(4 * PREPARED * RING);
    Runtime::Idle.run(async move {
        let mut listener = listen(config).await;
        let (_, mappings) = descriptors_and_mappings();
        let port = listener.local_addr().port();
        let slow = HalfWay::new(port).await;
        let clients =
            tokio::task::spawn_blocking(move || Child::start(&[], &format!("stop-half-way {port}")));
        let clients = clients.await.unwrap();
        for _ in 0..3 {
            serves(&mut listener).await;
        }
        // A queue pair and its receive memory take a handful of mappings.
        let each = (descriptors_and_mappings().1 - mappings) / PREPARED as usize;
        assert!(each <= 8, "{each} mappings for each of the {PREPARED} that may be unfinished");
        // A client that lost its place because it was slow uses TCP.
        let peer = slow.to.local_addr().unwrap();
        let client = slow.goes_on().await;
        let server = accept(&mut listener, peer).await;
        assert_eq!((client.info().verdict(), server.info().verdict()), (Verdict::Tcp, Verdict::Tcp));
        assert!(server.info().reason().contains("unfinished negotiations"), "{}", server.info().reason());
        drop(clients);
    });
    announce("served");
}

/// Plays the role `stop-half-way`: negotiations with the listener on `port` stop after its answer.
pub(crate) fn play_stop_half_way(port: u16) {
    Runtime::Idle.run_for_ever(async move {
        let mut held = Vec::new();
        for _ in 0..HALF_OPEN {
            held.push(HalfWay::new(port).await);
        }
        announce("stopped");
        std::future::pending::<()>().await;
    });
}

/// A client that dials through a relay, which has passed only the hello on. The listener has answered.
struct HalfWay {
    from: TcpStream,
    to: TcpStream,
    answer: Vec<u8>,
    client: tokio::task::JoinHandle<EndpointStream>,
}

impl HalfWay {
    async fn new(port: u16) -> Self {
        let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let here = relay.local_addr().unwrap().port();
        let dial = async move { Dialer::new(patient()).dial("127.0.0.1", here).await.unwrap() };
        let client = tokio::spawn(dial);
        let (mut from, _) = relay.accept().await.unwrap();
        let mut to = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        to.write_all(&message(&mut from).await).await.unwrap();
        let answer = message(&mut to).await;
        Self { from, to, answer, client }
    }

    /// Passes everything on from here on. Returns the client's connection.
    async fn goes_on(self) -> EndpointStream {
        let Self { mut from, mut to, answer, client } = self;
        from.write_all(&answer).await.unwrap();
        tokio::spawn(async move { tokio::io::copy_bidirectional(&mut from, &mut to).await });
        client.await.unwrap()
    }
}

/// Reads one message of the negotiation.
async fn message(tcp: &mut TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    while !matches!(Message::decode(&received), Ok(Some(_))) {
        assert_ne!(tcp.read_buf(&mut received).await.unwrap(), 0, "closed after {received:?}");
    }
    received
}

/// The clients' device has accepted connections, and answers nothing.
#[test]
fn clients_whose_device_does_not_answer_keep_no_client_out() {
    in_a_child("no-answer silent");
}

/// The clients' device listens, and takes no more connections.
#[test]
fn clients_whose_device_takes_no_connection_keep_no_client_out() {
    in_a_child("no-answer full");
}

/// Each hello names a device of its own.
#[test]
fn clients_with_many_devices_that_do_not_answer_keep_no_client_out() {
    in_a_child("no-answer many");
}

/// Clients whose device does not answer.
const UNANSWERED: usize = 300;

/// Plays the role `no-answer`: the hellos of many clients name devices that do not answer.
pub(crate) fn play_no_answer(kind: &str) {
    let (silence, many) = match kind {
        "full" => (Silence::Full, false),
        kind => (Silence::Accepts, kind == "many"),
    };
    Runtime::Idle.run(async move {
        let mut listener = listen(patient()).await;
        name_devices(listener.local_addr(), silence, many).await;
        for _ in 0..5 {
            serves(&mut listener).await;
        }
    });
    announce("served");
}

/// Begins to dial `address` again and again with hellos that name silent devices. Each hello has two offers.
/// Returns when all clients have said hello.
async fn name_devices(address: SocketAddr, silence: Silence, many: bool) {
    let template = hello_of_a_client().await;
    let device = Arc::new(SilentDevice::new(silence));
    let said = Arc::<AtomicUsize>::default();
    for number in 0..UNANSWERED {
        let device = if many { Arc::new(SilentDevice::new(silence)) } else { Arc::clone(&device) };
        let (mut hello, said) = (template.clone(), Arc::clone(&said));
        device.replace_in(&mut hello.offers[0].queue_pair);
        hello.offers.push(hello.offers[0].clone());
        let hello = Message::ClientHello(hello).encode().unwrap();
        tokio::spawn(async move {
            let _device = device;
            loop {
                let mut tcp = TcpStream::connect(address).await.unwrap();
                tcp.write_all(&hello).await.unwrap();
                said.fetch_add(1, Ordering::Relaxed);
                if number % 4 == 0 {
                    // This client hangs up.
                    return;
                }
                while tcp.read(&mut [0; 256]).await.is_ok_and(|count| count > 0) {}
            }
        });
    }
    until(|| said.load(Ordering::Relaxed) >= UNANSWERED).await;
}

/// The device of another user answers the question whether it is there, and connects no queue pair. The wait
/// for it takes threads.
#[test]
fn another_user_whose_device_connects_nothing_keeps_no_client_out() {
    if !Command::new(NOBODY[0]).args(&NOBODY[1..]).arg("true").status().is_ok_and(|status| status.success()) {
        println!("skipped: becoming another user needs root and setpriv");
        return;
    }
    let child = Child::start(&["env", "RDMA_SOFT_PEERS=any"], "beside-another-user");
    assert_eq!(child.word, "served");
    child.ends();
}

const NOBODY: [&str; 4] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];

/// Plays the role `beside-another-user`: the server.
pub(crate) fn play_beside_another_user() {
    Runtime::Idle.run(async move {
        let mut listener = listen(patient()).await;
        let role = format!("another-user {}", listener.local_addr().port());
        // The other user may have no right to run this binary where it is.
        let copy = OpenCopy::new();
        let binary = copy.path();
        let other =
            tokio::task::spawn_blocking(move || Child::start_copy(&binary, &NOBODY, &role)).await.unwrap();
        assert_eq!(other.word, "said");
        for _ in 0..5 {
            serves(&mut listener).await;
        }
    });
    announce("served");
}

/// Plays the role `another-user`.
pub(crate) fn play_another_user(port: u16) {
    Runtime::Idle.run_for_ever(async move {
        name_devices(([127, 0, 0, 1], port).into(), Silence::Refuses, false).await;
        announce("said");
        std::future::pending::<()>().await;
    });
}

/// Returns the hello of a client of this process.
async fn hello_of_a_client() -> ClientHello {
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let here = relay.local_addr().unwrap().port();
    tokio::spawn(async move { Dialer::new(patient()).dial("127.0.0.1", here).await });
    let (mut tcp, _) = relay.accept().await.unwrap();
    match Message::decode(&message(&mut tcp).await) {
        Ok(Some((Message::ClientHello(hello), _))) => hello,
        other => panic!("{other:?}"),
    }
}

/// More clients connect than a listener negotiates with at a time. Those that have said hello get an answer
/// before they lose their places.
#[test]
fn a_client_that_has_said_hello_gets_an_answer_when_it_loses_its_place() {
    in_a_child("displaced");
}

/// Plays the role `displaced`.
pub(crate) fn play_displaced() {
    const MORE: usize = 50;
    Runtime::Idle.run(async move {
        let mut listener = listen(patient()).await;
        let address = listener.local_addr();
        tokio::spawn(async move { while listener.next().await.is_some() {} });
        let device = SilentDevice::new(Silence::Accepts);
        let mut hello = hello_of_a_client().await;
        device.replace_in(&mut hello.offers[0].queue_pair);
        let hello = Message::ClientHello(hello).encode().unwrap();
        let mut clients = Vec::new();
        for _ in 0..NEGOTIATIONS + MORE {
            let mut tcp = TcpStream::connect(address).await.unwrap();
            tcp.write_all(&hello).await.unwrap();
            clients.push(tcp);
        }
        // Each client gets an answer in the end, because its device does not answer.
        for mut tcp in clients {
            let answer = message(&mut tcp).await;
            assert!(matches!(Message::decode(&answer), Ok(Some(_))));
        }
    });
    announce("served");
}
