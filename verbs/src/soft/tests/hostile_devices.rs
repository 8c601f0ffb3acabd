//! A process that listens under the name of a device, and answers as no device does.
#![allow(clippy::print_stdout, reason = "a skip says why")]

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::process::Command;
use std::{fs, thread};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};
use rustix::process::Resource;

use super::*;
use crate::QueuePairAddress;
use crate::soft::peers::message::{
    self, Address, Answer, DeviceId, EndAnswer, Object, Reply, Request, VERSION,
};
use crate::soft::peers::received::tests::{ends_soon, lingering, socket_pair};
use crate::soft::shared::attention::Attention;
use crate::soft::shared::end::EndState;
use crate::soft::shared::platform::Native;

/// The limit on open files of a process that a test starts.
const LIMIT: &str = "TONIC_RDMA_DESCRIPTORS";
/// Descriptors that a message can carry.
const MOST: usize = 253;

/// Listens under the name of a device with the number `nonce`. Returns the address of a queue pair of this
/// device.
fn listen(nonce: u64) -> (OwnedFd, QueuePairAddress) {
    let device = DeviceId { process: std::process::id(), nonce, ..the_device().id };
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let name = SocketAddrUnix::new_abstract_name(device.socket_name().as_bytes()).unwrap();
    rustix::net::bind(&listener, &name).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    (listener, QueuePairAddress::from(Address { device, number: 1, token: 2 }))
}

/// Sends `bytes` and descriptors, without waiting.
fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(descriptors)));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(())
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Answers requests of other numbers without end, with descriptors that can't be closed soon. Does nothing in
/// the usual run of the tests, whose other threads open descriptors, too.
#[test]
fn flooded() {
    let Some(limit) = std::env::var_os(LIMIT) else { return };
    let mut files = rustix::process::getrlimit(Resource::Nofile);
    files.current = Some(limit.to_str().unwrap().parse().unwrap());
    rustix::process::setrlimit(Resource::Nofile, files).unwrap();
    let context = soft::open().unwrap();
    let mut honest = Honest::connected();
    let (listener, address) = listen(0x5eed);
    let before = open_descriptors();
    let flood = thread::spawn(move || {
        let client = rustix::net::accept(&listener).unwrap();
        let mut reply = [0; 72];
        reply[..8].copy_from_slice(&[0xff; 8]);
        reply[9] = VERSION;
        let (mut others, start) = (Vec::new(), Instant::now());
        let mut hung_up = false;
        // Ends when the caller hangs up.
        while !hung_up && start.elapsed() < TIMEOUT {
            let (socket, other) = lingering();
            others.push(other);
            while let Err(error) = send(&client, &reply, &[socket.as_fd(); MOST]) {
                hung_up =
                    !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::PermissionDenied);
                if hung_up || start.elapsed() > TIMEOUT {
                    break;
                }
                thread::yield_now();
            }
            // This may be the last close.
            thread::spawn(move || drop(socket));
        }
        hung_up.then_some(others)
    });
    let side = Side::new();
    let start = Instant::now();
    let error = side.pair.to_rtr(&address, &PathSettings::default()).unwrap_err();
    assert!(start.elapsed() < TIMEOUT / 2, "{:?}: {error}", start.elapsed());
    honest.exchange();
    let mut second = Honest::connected();
    second.exchange();
    drop(side);
    let others = flood.join().unwrap().unwrap();
    let held = open_descriptors().saturating_sub(before + 2 * others.len());
    assert!(held < 300, "{held} descriptors more: {error}");
    // A descriptor blocks the thread that closes those of the replies.
    let (socket, other_end) = lingering();
    crate::soft::closer::close(socket, None);
    let (listener, address) = listen(0x5eee);
    serve(listener, move |client, request| {
        let descriptor = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let reply = Reply { sequence: request.sequence, answer: Answer::End(given(1 << 18)) };
        let _ = message::send_reply(client, &reply, &[descriptor.as_fd()]);
    });
    let before = open_descriptors();
    let refusals: Vec<_> = (0..200)
        .map(|_| Side::new().pair.to_rtr(&address, &PathSettings::default()).unwrap_err().to_string())
        .collect();
    let held = open_descriptors().saturating_sub(before);
    assert!(held < 300, "{held} descriptors more");
    assert!(refusals[0].contains("no memfd") && refusals[199].contains("not closed yet"), "{refusals:?}");
    drop((second, others, other_end, context));
}

/// Replies full of descriptors cost this process no more than one descriptor, and no thread waits for the end
/// of these.
#[test]
fn replies_full_of_sockets_that_linger() {
    for limit in ["4096", "512"] {
        let test = "soft::tests::hostile_devices::flooded";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child.args([test, "--exact"]).env(LIMIT, limit).output().unwrap();
        assert!(output.status.success(), "{limit} files: {}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Waits for requests on each connection to `listener`, and has `answer` answer them, in a thread for each.
fn serve(listener: OwnedFd, answer: impl Fn(&OwnedFd, &Request) + Clone + Send + 'static) {
    thread::spawn(move || {
        while let Ok(client) = rustix::net::accept(&listener) {
            let answer = answer.clone();
            thread::spawn(move || {
                loop {
                    let forever = None;
                    let _ = rustix::event::poll(&mut [PollFd::new(&client, PollFlags::IN)], forever);
                    match message::receive_request(&client) {
                        Ok(Some((request, _))) => answer(&client, &request),
                        _ => break,
                    }
                }
            });
        }
    });
}

/// Returns the attributes of a queue pair of a hostile process.
fn given(ring: u64) -> EndAnswer {
    let access = all();
    EndAnswer { access, shares_memory: false, ring, domain: 1, send_queue: 2, receive_queue: 3 }
}

/// An end of a hostile process, and the device that gives it to one queue pair.
struct Liar {
    end: Arc<PairEnd>,
    address: QueuePairAddress,
}

impl Liar {
    /// `answer` answers the requests for connections to completion queues.
    fn new(nonce: u64, answer: impl Fn(&OwnedFd, Reply) + Clone + Send + 'static) -> Self {
        let (listener, address) = listen(nonce);
        let ring = PairEnd::ring_for(256);
        let (end, fd) = PairEnd::create(ring, nonce, 7).unwrap();
        let (end, fd) = (Arc::new(end), Arc::new(fd));
        serve(listener, move |client, request| {
            let reply = |answer| Reply { sequence: request.sequence, answer };
            match request.object {
                Object::End { .. } => {
                    message::send_reply(client, &reply(Answer::End(given(ring))), &[fd.as_fd()]).unwrap();
                }
                Object::EventSocket(_) => answer(client, reply(Answer::Object)),
                _ => {}
            }
        });
        Self { end, address }
    }
}

/// No descriptor of a peer becomes an event socket, whatever it is.
#[test]
fn a_descriptor_in_place_of_a_connection_is_refused() {
    let context = soft::open().unwrap();
    let (pipe, writer) = rustix::pipe::pipe().unwrap();
    let (tcp, other_end) = lingering();
    let (connected, another_end) = socket_pair();
    let unix = |kind| rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
    let (stream, lone, listener) = (unix(SocketType::STREAM), unix(SocketType::SEQPACKET), listen(0x11ea).0);
    for (number, descriptor) in
        [pipe, writer, tcp, connected, stream, lone, listener].into_iter().map(Arc::new).enumerate()
    {
        let kept = Arc::clone(&descriptor);
        let liar = Liar::new(0xdead_0000 + number as u64, move |client, reply| {
            // From Linux 6.16 on, the kernel refuses the descriptor.
            if message::send_reply(client, &reply, &[descriptor.as_fd()]).is_err() {
                let _ = rustix::net::shutdown(client, rustix::net::Shutdown::Both);
            }
        });
        ends_soon(move || {
            let side = Side::new();
            side.pair.to_rtr(&liar.address, &PathSettings::default()).unwrap_err();
        });
        drop(kept);
    }
    drop((other_end, another_end, context));
}

/// Several addresses of one negotiation may name one device that does not answer.
#[test]
fn a_device_that_does_not_answer_is_not_asked_again_at_once() {
    let context = soft::open().unwrap();
    let (_listener, address) = listen(0x51e7);
    // A thread that gets no core for a second asks again.
    let refused = (0..20).any(|_| {
        let sides = [Side::new(), Side::new()];
        let fails =
            |side: &Side| side.pair.to_rtr(&address, &PathSettings::default()).unwrap_err().to_string();
        let [first, second] = [fails(&sides[0]), fails(&sides[1])];
        assert!(first.contains("did not answer"), "{first}");
        second.contains("a moment ago")
    });
    assert!(refused);
    drop(context);
}

/// A page whose first access waits until this value is dropped; `None` if the system does not permit it.
struct Stuck {
    page: usize,
    handler: OwnedFd,
}

impl Stuck {
    fn new() -> Option<Self> {
        const LENGTH: usize = 4096;
        const API: libc::c_ulong = 0xc018_aa3f;
        const REGISTER: libc::c_ulong = 0xc020_aa00;
        // SAFETY: makes a descriptor.
        let handler = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if handler < 0 {
            return None;
        }
        // SAFETY: the kernel has just made the descriptor for this call, so nothing else owns it.
        let handler = unsafe { OwnedFd::from_raw_fd(handler as RawFd) };
        let (flags, protection) =
            (rustix::mm::MapFlags::PRIVATE, rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE);
        // SAFETY: a fresh mapping at an address of the kernel's choosing touches no other memory.
        let page = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), LENGTH, protection, flags).unwrap() as usize
        };
        let mut api = [0xaa_u64, 0, 0];
        let mut register = [page as u64, LENGTH as u64, 1, 0];
        // SAFETY: the kernel reads and writes these structures only, which are as long as the numbers of the
        // calls say.
        let made = unsafe {
            libc::ioctl(handler.as_raw_fd(), API, &raw mut api) == 0
                && libc::ioctl(handler.as_raw_fd(), REGISTER, &raw mut register) == 0
        };
        made.then_some(Self { page, handler })
    }

    /// Waits until a thread waits for the page.
    fn wait_for_access(&self) {
        let timeout = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        let mut waiting = [PollFd::new(&self.handler, PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut waiting, Some(&timeout)), Ok(1));
    }
}

/// A peer holds the locks of its ends of all sockets for as long as it wants, because it receives into memory
/// that does not come. This process can still wake it, poll, and go.
#[test]
fn a_peer_that_holds_locks_of_its_sockets_blocks_no_thread() {
    let Some(stuck) = Stuck::new() else {
        println!("skipped: userfaultfd is not permitted here");
        return;
    };
    let (context, page, stuck) = (soft::open().unwrap(), stuck.page, Arc::new(stuck));
    let liar = Liar::new(0x10c5, move |client, reply| {
        message::send_reply(client, &reply, &[]).unwrap();
        // SAFETY: the page is mapped as long as the process lives, and nothing else uses it.
        unsafe { libc::recv(client.as_raw_fd(), page as *mut libc::c_void, 1, 0) };
    });
    let (end, held) = (Arc::clone(&liar.end), Arc::clone(&stuck));
    ends_soon(move || {
        let side = Side::new();
        side.pair.to_rtr(&liar.address, &PathSettings::default()).unwrap();
        end.advance(EndState::Ready);
        end.posted_word().store(1000, Relaxed);
        side.pair.to_rts(&PathSettings::default()).unwrap();
        for round in 0..200 {
            // Each time, the peer asks for another event.
            Attention::NEWS.ask::<Native>(end.attention_word());
            assert!(side.send(round, 100));
            side.drain();
            if round == 0 {
                held.wait_for_access();
            }
        }
        drop(side);
    });
    drop((stuck, context));
}
