//! The socket of the device: a peer gets what its queue pair may share, and descriptors that it sends are
//! checked.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType};

use super::*;
use crate::soft::forked::Origin;
use crate::soft::peers::level::Policy;
use crate::soft::peers::message::{self, Address, Answer, DeviceId, Object, Reply, Request};
use crate::soft::peers::received::{Received, Socket};
use crate::soft::peers::service::Service;
use crate::soft::peers::sockets::Sockets;
use crate::{QueuePairAddress, QueuePairState};

fn dial() -> OwnedFd {
    let fd = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let name = SocketAddrUnix::new_abstract_name(the_device().id.socket_name().as_bytes()).unwrap();
    rustix::net::connect(&fd, &name).unwrap();
    fd
}

/// Returns whether the socket is readable within the time limit of a test.
fn readable(fd: &impl AsFd) -> bool {
    let timeout = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

/// Returns the device's answer; `None` if the device hung up.
fn ask(fd: &impl AsFd, request: &Request) -> Option<(Reply, Option<Received>)> {
    message::send_request(fd, request, None).ok()?;
    assert!(readable(fd), "no answer");
    message::receive_reply(fd).ok()
}

fn address_of(side: &Side) -> Address {
    Address::decode(&side.pair.local_address()).unwrap()
}

/// The device gives descriptors only to a peer that knows the token, and only those of the queue pair's own
/// objects. It gives an end, and takes a connection to a completion queue, once.
#[test]
fn descriptors_go_only_to_peers_with_the_token() {
    let (side, other) = (Side::new(), Side::new());
    let address = address_of(&side);
    let fd = dial();
    let good = Request { sequence: 5, number: address.number, token: address.token, object: Object::Table };
    let (reply, table) = ask(&fd, &good).unwrap();
    assert_eq!((reply, table.is_some()), (Reply { sequence: 5, answer: Answer::Object }, true));
    let refused = |request: &Request| {
        let (reply, none) = ask(&fd, request).unwrap();
        assert_eq!((reply.answer, none.is_none()), (Answer::Refused, true), "{request:?}");
    };
    for object in [Object::Table, Object::End { requester: 1 }, Object::EventSocket(side.core.send_queue.id)]
    {
        refused(&Request { token: address.token ^ 1, object, ..good });
        refused(&Request { number: address.number ^ (1 << 31), object, ..good });
    }
    for id in [0, u64::MAX, other.core.send_queue.id] {
        refused(&Request { object: Object::EventSocket(id), ..good });
    }
    let wakes = Request { object: Object::EventSocket(side.core.send_queue.id), ..good };
    // Only the process that has taken the end wakes the pollers.
    refused(&wakes);
    let end = Request { object: Object::End { requester: 1 }, ..good };
    assert!(ask(&fd, &end).unwrap().1.is_some());
    refused(&end);
    // The connection of the request is the event socket from then on.
    let waker = dial();
    let (reply, none) = ask(&waker, &wakes).unwrap();
    assert_eq!((reply.answer, none.is_none()), (Answer::Object, true));
    rustix::net::send(&waker, b"x", SendFlags::NOSIGNAL).unwrap();
    wait_for("the event", || side.core.send_queue.take_peers_events() == 1);
    refused(&wakes);
    // The peer that took the end is the only one that this queue pair connects to.
    assert!(side.pair.to_rtr(&other.pair.local_address(), &PathSettings::default()).is_err());
    assert_eq!(side.pair.state(), QueuePairState::Init);
}

/// A process that knows one queue pair makes connection after connection, and proves each of them. Neither
/// the connections that were there before nor new ones lose their slots.
#[test]
fn connections_that_prove_one_queue_pair_keep_no_other_out() {
    let id = DeviceId { process: 1, nonce: crate::queue_pair::random().unwrap(), directory: 0 };
    let policy = Policy::TrustedUser;
    let listener = Sockets::Namespace.listen(id, policy, Origin::here().unwrap()).unwrap();
    let service = Arc::new(Service::new(listener, policy).unwrap());
    let thread = thread::spawn({
        let service = Arc::clone(&service);
        move || service.run()
    });
    let sides = [(); 3].map(|()| Side::new());
    let [early, hostile, late] = sides.each_ref().map(|side| {
        service.add_queue_pair(the_device().service.queue_pair(side.pair.number().0).unwrap());
        let Address { number, token, .. } = address_of(side);
        Request { sequence: 1, number, token, object: Object::Table }
    });
    let connect = || {
        let socket = Sockets::Namespace.connect(id, policy, Instant::now() + TIMEOUT).unwrap();
        socket.take_descriptors();
        socket
    };
    let has_answer = |fd: &Socket, request| ask(fd, request).is_some_and(|(_, table)| table.is_some());
    let first = connect();
    assert!(has_answer(&first, &early));
    let mut flood = Vec::new();
    for number in 0..600 {
        flood.push(connect());
        assert!(has_answer(&flood[number], &hostile), "connection {number}");
        // A process takes nothing more from one that has sent 256 descriptors which are not closed yet.
        if number % 64 == 0 {
            crate::soft::closer::wait_until_free();
        }
    }
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let is_open =
        |fd: &&Socket| rustix::event::poll(&mut [PollFd::new(*fd, PollFlags::RDHUP)], Some(&now)) == Ok(0);
    let open = flood.iter().filter(is_open).count();
    assert!(open < 200, "{open}");
    assert!(has_answer(&first, &early));
    assert!(has_answer(&connect(), &late));
    service.stop();
    thread.join().unwrap();
}

/// Garbage on a socket ends the connection of that socket only.
#[test]
fn garbage_on_the_socket() {
    let side = Side::new();
    let bystander = dial();
    for length in [0, 1, 39, 40, 41, 5000] {
        let fd = dial();
        rustix::net::send(&fd, &vec![0xa5; length], SendFlags::NOSIGNAL).unwrap();
        assert!(readable(&fd), "{length} bytes: not hung up");
    }
    let address = address_of(&side);
    let good = Request { sequence: 1, number: address.number, token: address.token, object: Object::Table };
    assert!(ask(&bystander, &good).unwrap().1.is_some());
}

/// Returns a memfd of 8192 bytes with `seals`.
fn memfd(seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, 8192).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// Offers of descriptors that are no sealed memory, or shorter than said, are refused; the connection of the
/// socket continues.
#[test]
fn offers_of_wrong_descriptors_are_refused() {
    let mut honest = Honest::connected();
    let side = Side::new();
    let address = address_of(&side);
    let fd = dial();
    let request = |object| Request { sequence: 1, number: address.number, token: address.token, object };
    assert!(ask(&fd, &request(Object::End { requester: 1 })).unwrap().1.is_some());
    let segments = Arc::clone(side.core.segments().unwrap());
    let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let wrong: Vec<(OwnedFd, u64)> = vec![
        (memfd(SealFlags::empty()), 8192),
        (memfd(SealFlags::SHRINK | SealFlags::GROW), 8192),
        (memfd(SealFlags::SHRINK | SealFlags::FUTURE_WRITE), 8192),
        (memfd(sealed), 8193),
        (memfd(sealed), 0),
        (memfd(sealed), u64::MAX),
        (pipe, 8192),
        (event, 8192),
        (dial(), 8192),
        (File::open("/dev/zero").unwrap().into(), 8192),
        (File::open(std::env::current_exe().unwrap()).unwrap().into(), 8192),
    ];
    for (id, (descriptor, length)) in wrong.iter().enumerate() {
        let id = id as u64 + 1;
        let offer = request(Object::Offer { id, length: *length });
        message::send_request(&fd, &offer, Some(descriptor.as_fd())).unwrap();
        // The device answers requests in order.
        assert!(ask(&fd, &request(Object::Table)).is_some());
        assert!(segments.find(id).is_none(), "descriptor {id}");
        honest.exchange();
    }
    // An offer without a descriptor, and an offer for a queue pair of another process.
    message::send_request(&fd, &request(Object::Offer { id: 50, length: 8192 }), None).unwrap();
    let unknown = Request { token: address.token ^ 1, ..request(Object::Offer { id: 51, length: 8192 }) };
    message::send_request(&fd, &unknown, Some(memfd(sealed).as_fd())).unwrap();
    let good = request(Object::Offer { id: 52, length: 8192 });
    message::send_request(&fd, &good, Some(memfd(sealed).as_fd())).unwrap();
    assert!(ask(&fd, &request(Object::Table)).is_some());
    assert_eq!([50, 51, 52].map(|id| segments.find(id).is_some()), [false, false, true]);
    // The memory is unmapped when the peer says so.
    message::send_request(&fd, &request(Object::Withdraw { id: 52 }), None).unwrap();
    assert!(ask(&fd, &request(Object::Leave)).is_some());
    assert!(segments.find(52).is_none());
}

/// Returns the number of descriptors and mappings of memory with this name.
fn open_memory(name: &str) -> (usize, usize) {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let named = |text: &str| text.contains(&format!("/memfd:{name} "));
    (
        links.filter(|link| named(&link.to_string_lossy())).count(),
        maps.lines().filter(|line| named(line)).count(),
    )
}

/// The last close of memory of a peer, and the end of its last mapping, can take long, because they free all
/// pages. The device's thread answers meanwhile.
#[test]
fn memory_of_a_peer_is_freed_by_a_thread_of_its_own() {
    const NAME: &str = "freed-elsewhere";
    let memory = |seals| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(NAME, flags).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let side = Side::new();
    let address = address_of(&side);
    let fd = dial();
    let request = |object| Request { sequence: 1, number: address.number, token: address.token, object };
    assert!(ask(&fd, &request(Object::End { requester: 1 })).unwrap().1.is_some());
    let (release, wait) = std::sync::mpsc::channel::<()>();
    // As if the thread freed very much memory.
    crate::soft::closer::free(move || assert!(wait.recv().is_err()));
    let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    for (id, seals) in [(70, SealFlags::empty()), (71, sealed)] {
        let offer = request(Object::Offer { id, length: 8192 });
        // The device gets the last descriptor.
        message::send_request(&fd, &offer, Some(memory(seals).as_fd())).unwrap();
    }
    assert!(ask(&fd, &request(Object::Table)).is_some());
    assert_eq!(open_memory(NAME), (1, 1), "one is refused, and one is mapped");
    message::send_request(&fd, &request(Object::Withdraw { id: 71 }), None).unwrap();
    assert!(ask(&fd, &request(Object::Table)).is_some());
    assert!(side.core.segments().unwrap().find(71).is_none());
    assert_eq!(open_memory(NAME), (1, 1), "nothing is freed by the device's thread");
    drop(release);
    crate::soft::closer::wait_until_free();
    assert_eq!(open_memory(NAME), (0, 0));
}

/// A device that answers requests of other numbers without end does not keep a call from returning.
#[test]
fn replies_without_end() {
    let context = soft::open().unwrap();
    let device = DeviceId { process: std::process::id(), nonce: 0x5eed, ..the_device().id };
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let name = SocketAddrUnix::new_abstract_name(device.socket_name().as_bytes()).unwrap();
    rustix::net::bind(&listener, &name).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let flood = thread::spawn(move || {
        let client = rustix::net::accept(&listener).unwrap();
        let reply = Reply { sequence: u64::MAX, answer: Answer::Refused };
        let start = Instant::now();
        // Ends when the caller hangs up.
        loop {
            match message::send_reply(&client, &reply, &[]) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => break true,
            }
            if start.elapsed() > TIMEOUT {
                break false;
            }
        }
    });
    let side = Side::new();
    let address = QueuePairAddress::from(Address { device, number: 1, token: 2 });
    let error = side.pair.to_rtr(&address, &PathSettings::default()).unwrap_err();
    drop(side);
    assert!(flood.join().unwrap(), "the call lasted as long as the flood: {error}");
    drop(context);
}
