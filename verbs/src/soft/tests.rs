//! A hostile or confused peer. This process goes on, whatever the peer writes to shared memory or sends over the socket.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::any::Any;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType};

use super::context;
use super::device::Device;
use super::queue_pair::core::Core;
use crate::soft::peers::address::Address;
use crate::soft::peers::message::{self, Answer, Object, Reply, Request};
use crate::{
    Access, CompletionQueue, CompletionStatus, Context, HostMemory, LocalSegment, MemoryRegion, Operation,
    PathSettings, Payload, QueuePair, QueuePairCapacity, QueuePairState, ReceiveRequest, SendRequest,
    WorkCompletion, soft,
};

const RECEIVES: u64 = 16;

struct Side {
    _context: Arc<dyn Context>,
    queue: Arc<dyn CompletionQueue>,
    pair: Arc<dyn QueuePair>,
    region: Arc<dyn MemoryRegion>,
    inner: Arc<Core>,
}

fn the_device() -> Arc<Device> {
    context::current().unwrap()
}

impl Side {
    fn new() -> Self {
        let context = soft::open().unwrap();
        let domain = context.alloc_protection_domain().unwrap();
        let queue = context.create_completion_queue(256).unwrap();
        let capacity = QueuePairCapacity {
            send_requests: 64,
            receive_requests: RECEIVES as u32,
            send_segments: 2,
            receive_segments: 2,
            inline: 256,
        };
        let pair = domain.create_queue_pair(&queue, &queue, &capacity).unwrap();
        let all = Access::from_bits_truncate(7);
        pair.to_init(all).unwrap();
        let memory = Arc::new(HostMemory::shared(1 << 16, 4096).unwrap());
        let region = domain.register(memory, all).unwrap();
        let local: Arc<dyn Any + Send + Sync> = the_device().service().queue_pair(pair.number().0).unwrap();
        let inner = local.downcast().unwrap();
        Self { _context: context, queue, pair, region, inner }
    }

    fn connected() -> (Self, Self) {
        let (a, b) = (Self::new(), Self::new());
        let settings = PathSettings::default();
        a.pair.to_rtr(&b.pair.local_address(), &settings).unwrap();
        b.pair.to_rtr(&a.pair.local_address(), &settings).unwrap();
        a.pair.to_rts(&settings).unwrap();
        b.pair.to_rts(&settings).unwrap();
        (a, b)
    }

    fn post_receive(&self, wr_id: u64) -> bool {
        // SAFETY: no reference to the memory exists.
        let into = unsafe { [LocalSegment::new(&*self.region, 0..256)] };
        self.pair.post_receive(&[ReceiveRequest { wr_id, into: &into }]).is_ok()
    }

    fn send(&self, length: usize) {
        let payload = vec![1; length];
        let slices = [IoSlice::new(&payload)];
        let operation = Operation::Send { data: Payload::Inline(&slices), immediate: None };
        let _ = self.pair.post_send(&[SendRequest { wr_id: 1000, operation, signaled: true }]);
    }

    /// Takes the completions that have come. Every completion must belong to a posted request.
    fn drain(&self) -> usize {
        let mut completions = [WorkCompletion::EMPTY; 8];
        let count = self.queue.poll(&mut completions);
        for completion in &completions[..count] {
            assert!(completion.wr_id < RECEIVES || completion.wr_id == 1000, "{completion:?}");
            assert_eq!(completion.queue_pair, self.pair.number());
        }
        count
    }
}

/// Returns a small generator whose values depend only on `seed`, so that a failure can be repeated.
fn random(seed: u64) -> impl Fn(usize) -> u64 {
    move |index| {
        let mut value = (seed << 20 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        value ^= value >> 29;
        value = value.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        // Many of the values look like valid ones.
        match value >> 60 {
            0..4 => value % 8,
            4..6 => (value % 40) << 32 | value >> 50 & 3,
            6 => u64::MAX,
            _ => value ^ value >> 32,
        }
    }
}

/// Replaces the section word by an even number. A thread would wait while the word is odd, and `a_section_without_end` tests
/// that.
fn without_section(values: impl Fn(usize) -> u64) -> impl Fn(usize) -> u64 {
    move |index| if index == 32 { 0 } else { values(index) }
}

/// If a link is overwritten with garbage while it is in use, at worst the connection ends.
#[test]
fn links_full_of_garbage() {
    for seed in 0..60 {
        let (a, b) = Side::connected();
        (0..RECEIVES).for_each(|wr_id| assert!(b.post_receive(wr_id)));
        a.send(100);
        if seed % 2 == 0 {
            b.inner.link.scribble(without_section(random(seed)));
        }
        if seed % 3 == 0 {
            a.inner.link.scribble(without_section(random(seed + 1000)));
        }
        let mut taken = 0;
        for _ in 0..50 {
            a.send(200);
            b.send(10);
            a.drain();
            taken += b.drain();
        }
        assert!(taken <= RECEIVES as usize + 50, "seed {seed}");
        b.pair.to_error();
        a.pair.to_error();
    }
}

/// A section that never ends delays a flush and a deregistration only for a bounded time.
#[test]
fn a_section_without_end() {
    let (a, b) = Side::connected();
    assert!(b.post_receive(3));
    #[expect(clippy::disallowed_methods, reason = "a peer that stops in the middle never leaves")]
    std::mem::forget(a.inner.link.enter(&AtomicU64::new(11)));
    let start = Instant::now();
    b.pair.to_error();
    let mut completions = [WorkCompletion::EMPTY; 2];
    assert_eq!(b.queue.poll(&mut completions), 0, "the peer may still be writing");
    b.queue.arm().unwrap();
    while b.queue.poll(&mut completions) == 0 {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((completions[0].wr_id, completions[0].status), (3, CompletionStatus::WorkRequestFlushed));
    drop(b);
    assert!(start.elapsed() < Duration::from_secs(20));
}

/// A peer that never stops scribbling over its own link, our link, and both completion queues.
#[test]
fn scribbling_without_end() {
    let (a, b) = Side::connected();
    let stop = AtomicBool::new(false);
    let (one, two) = (a.inner.clone(), b.inner.clone());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for seed in 0u64.. {
                one.link.scribble(without_section(random(seed)));
                two.link.scribble(without_section(random(seed)));
                one.send_queue.bell().scribble(random(seed));
                two.send_queue.bell().scribble(random(seed + 1));
                if stop.load(Relaxed) {
                    break;
                }
            }
        });
        let until = Instant::now() + Duration::from_millis(300);
        while Instant::now() < until {
            for side in [&a, &b] {
                side.post_receive(1);
                side.send(64);
                side.drain();
            }
        }
        stop.store(true, Relaxed);
    });
    drop((one, two));
}

/// Garbage in the page of a completion queue makes no completion, and no later completion is lost.
#[test]
fn completion_queue_page_full_of_garbage() {
    let (a, b) = Side::connected();
    for seed in 0..200 {
        b.inner.send_queue.bell().scribble(random(seed));
        let mut completions = [WorkCompletion::EMPTY; 4];
        assert_eq!(b.queue.poll(&mut completions), 0);
        assert!(b.post_receive(seed % RECEIVES));
        a.send(10);
        assert_eq!(b.queue.poll(&mut completions), 1);
        assert_eq!(
            (completions[0].wr_id, completions[0].status),
            (seed % RECEIVES, CompletionStatus::Success)
        );
        assert_eq!(a.queue.poll(&mut completions), 1);
    }
}

fn dial() -> OwnedFd {
    let fd = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let name = SocketAddrUnix::new_abstract_name(the_device().id().socket_name().as_bytes()).unwrap();
    rustix::net::connect(&fd, &name).unwrap();
    fd
}

/// Returns the device's answer; `None` if the device hung up.
fn ask(fd: &OwnedFd, request: &Request) -> Option<(Reply, Vec<OwnedFd>)> {
    message::send_request(fd, request).ok()?;
    let mut waiting = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut waiting, Some(&rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 })).unwrap();
    message::receive_reply(fd).ok()
}

/// The device gives descriptors only to a peer that knows the token, and only those of the queue pair's own objects. It gives
/// the link once.
#[test]
fn descriptors_go_only_to_peers_with_the_token() {
    let (side, other) = (Side::new(), Side::new());
    let address = Address::decode(&side.pair.local_address()).unwrap();
    let fd = dial();
    let good = Request { sequence: 5, number: address.number, token: address.token, object: Object::Table };
    let (reply, fds) = ask(&fd, &good).unwrap();
    assert_eq!((reply, fds.len()), (Reply { sequence: 5, answer: Answer::Object { length: 0 } }, 1));
    let refused = |request: &Request| {
        let (reply, fds) = ask(&fd, request).unwrap();
        assert_eq!((reply.answer, fds.len()), (Answer::Refused, 0), "{request:?}");
    };
    for object in [Object::Table, Object::Link { requester: 1 }] {
        refused(&Request { token: address.token ^ 1, object, ..good });
        refused(&Request { number: address.number ^ (1 << 31), object, ..good });
    }
    for id in [0, u64::MAX, other.inner.send_queue.id()] {
        refused(&Request { object: Object::Bell(id), ..good });
        refused(&Request { object: Object::Segment(id), ..good });
    }
    let link = Request { object: Object::Link { requester: 1 }, ..good };
    assert_eq!(ask(&fd, &link).unwrap().1.len(), 1);
    refused(&link);
    // The peer that took the link is the only one that this queue pair connects to.
    assert!(side.pair.to_rtr(&other.pair.local_address(), &PathSettings::default()).is_err());
    assert_eq!(side.pair.state(), QueuePairState::Init);
}

/// Garbage on a socket ends the connection of that socket only.
#[test]
fn garbage_on_the_socket() {
    let side = Side::new();
    let bystander = dial();
    for length in [0, 1, 39, 40, 41, 5000] {
        let fd = dial();
        let bytes = vec![0xa5; length];
        rustix::net::send(&fd, &bytes, SendFlags::NOSIGNAL).unwrap();
        let mut waiting = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let patience = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(
            rustix::event::poll(&mut waiting, Some(&patience)).unwrap(),
            1,
            "{length} bytes: not hung up"
        );
    }
    let address = Address::decode(&side.pair.local_address()).unwrap();
    let good = Request { sequence: 1, number: address.number, token: address.token, object: Object::Table };
    assert_eq!(ask(&bystander, &good).unwrap().1.len(), 1);
}
