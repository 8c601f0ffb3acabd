//! The ways to do harm. They know nothing of the layout of shared memory, nor of the messages between devices: they find mappings
//! and descriptors as the kernel lists them.

use std::collections::HashSet;
use std::fs::File;
use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};
use tonic_rdma_verbs::{CompletionStatus, HostMemory, WorkCompletion};

use crate::end::{ALL, MEMORY, ROOM, pattern, segment};
use crate::neighbour::Connection;
use crate::system;

/// The identifier of a request that is not a receive.
const SENT: u64 = 100;

/// What a scribbler writes.
#[derive(Clone, Copy, Debug)]
pub enum Scribble {
    Zeros,
    Ones,
    Counters,
    Random,
}

impl std::str::FromStr for Scribble {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "zeros" => Ok(Self::Zeros),
            "ones" => Ok(Self::Ones),
            "counters" => Ok(Self::Counters),
            "random" => Ok(Self::Random),
            other => Err(format!("no such scribble: {other}")),
        }
    }
}

/// Overwrites all memory that this process shares and may write, again and again.
pub fn scribble(what: Scribble) {
    for round in 0u64.. {
        std::thread::sleep(Duration::from_micros(fastrand::u64(..3000)));
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        for line in maps.lines().filter(|line| line.contains("/memfd:")) {
            let mut words = line.split_whitespace();
            let (Some(range), Some(rights)) = (words.next(), words.next()) else { continue };
            let Some((start, end)) = range.split_once('-') else { continue };
            let (start, end) = (number(start), number(end));
            // Memory of the application is large, and its content is of no interest to the device.
            let length = (end - start).min(64 << 10);
            if rights.ends_with('s') && length > 0 {
                let seed = fastrand::u64(..);
                system::overwrite(start, length, rights.contains('w'), |index| match what {
                    Scribble::Zeros => 0,
                    Scribble::Ones => u64::MAX,
                    Scribble::Counters => round.wrapping_add(index as u64),
                    Scribble::Random => (seed ^ index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
                });
                if end - start > length {
                    let last = end - (64 << 10).min(end - start);
                    system::overwrite(last, end - last, rights.contains('w'), |_| seed);
                }
            }
        }
    }
}

fn number(hex: &str) -> usize {
    usize::from_str_radix(hex, 16).unwrap_or_default()
}

/// Looks through all memory that this process shares or has descriptors of. Returns the number of pages that begin with a pattern of
/// the process under test: the part of a memory that it did not offer, or the content of its calls to the honest neighbour.
pub fn pages_of_others() -> usize {
    let mut pages = HashSet::new();
    let memory = File::open("/proc/self/mem").unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    for line in maps.lines().filter(|line| line.contains("/memfd:")) {
        let range = line.split(' ').next().unwrap_or_default();
        let Some((start, end)) = range.split_once('-') else { continue };
        let found = patterns_in(&memory, number(start) as u64, number(end) as u64);
        pages.extend(found.map(|page| (0, page)));
    }
    for descriptor in descriptors("/memfd:") {
        let Ok(file) = File::open(format!("/proc/self/fd/{descriptor}")) else { continue };
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        pages.extend(patterns_in(&file, 0, length).map(|page| (descriptor, page)));
    }
    pages.len()
}

/// Returns the pages of a file that begin with a pattern of any seed. The pattern of a seed differs from that of seed 0 by one value.
fn patterns_in(file: &File, start: u64, end: u64) -> impl Iterator<Item = u64> + '_ {
    (start..end).step_by(4096).filter(|&page| {
        let mut bytes = [0; 64];
        let known = pattern(0, bytes.len());
        if file.read_at(&mut bytes, page).is_err() {
            return false;
        }
        let first = bytes[0] ^ known[0];
        bytes.iter().zip(&known).all(|(found, known)| found ^ known == first)
    })
}

/// Returns the open descriptors of this process that stand for `kind`, such as `/memfd:`.
fn descriptors(kind: &str) -> Vec<RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let wanted = entries.filter(|entry| {
        std::fs::read_link(entry.path()).is_ok_and(|target| target.to_string_lossy().contains(kind))
    });
    wanted.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|&fd| fd > 2).collect()
}

/// Replaces descriptors that this process may send to its peers by descriptors of the wrong kind. `what` has the kind, and the
/// descriptors to replace: `wake-ups` (event descriptors and pairs of sockets), `large` (memory of the application), or
/// `small` (other memory).
pub fn swap_descriptors(what: &str) {
    let (kind, replaced) = what.split_once(' ').unwrap();
    let replacement: OwnedFd = match kind {
        "full-pipe" | "pipe-without-reader" => {
            let (reader, writer) = std::io::pipe().unwrap();
            if kind == "full-pipe" {
                rustix::io::ioctl_fionbio(&writer, true).unwrap();
                while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
                rustix::io::ioctl_fionbio(&writer, false).unwrap();
                // The reader stays open until the process ends.
                Box::leak(Box::new(reader));
            }
            writer.into()
        }
        "truncated" => {
            let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
            let memory = rustix::fs::memfd_create("unsealed", flags).unwrap();
            rustix::fs::ftruncate(&memory, 64 << 20).unwrap();
            memory
        }
        "huge-pages" => match system::hugetlb_memfd() {
            Some(memory) => {
                // SAFETY: the descriptor was made just now, and nothing else owns it.
                let memory = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(memory) };
                let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
                let _ = rustix::fs::ftruncate(&memory, 64 << 20);
                let _ = rustix::fs::fcntl_add_seals(&memory, seals);
                memory
            }
            None => return,
        },
        "device" => std::fs::OpenOptions::new().read(true).write(true).open("/dev/zero").unwrap().into(),
        other => panic!("no such kind of descriptor: {other}"),
    };
    let targets = match replaced {
        "wake-ups" => {
            let mut targets = descriptors("[eventfd]");
            targets.extend(descriptors("socket:").into_iter().filter(|&fd| system::is_unnamed_pair(fd)));
            targets
        }
        "large" => memories(MEMORY as u64..=MEMORY as u64),
        "small" => memories(0..=MEMORY as u64 - 1),
        other => panic!("no such descriptors: {other}"),
    };
    for target in targets {
        if target != replacement.as_raw_fd() {
            system::replace_descriptor(replacement.as_raw_fd(), target);
        }
    }
}

/// Returns the memfds whose length is one of `lengths`.
fn memories(lengths: RangeInclusive<u64>) -> Vec<RawFd> {
    let length = |fd: RawFd| std::fs::metadata(format!("/proc/self/fd/{fd}")).map_or(0, |file| file.len());
    descriptors("/memfd:").into_iter().filter(|&fd| lengths.contains(&length(fd))).collect()
}

/// Cuts off the memory of all memfds of this process, again and again.
pub fn truncate_memory() {
    loop {
        std::thread::sleep(Duration::from_millis(20));
        descriptors("/memfd:").into_iter().for_each(system::truncate);
    }
}

/// Makes all descriptors blocking, for all processes that share their open files, again and again.
pub fn make_everything_blocking() {
    loop {
        descriptors("").into_iter().for_each(system::make_blocking);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Stops the thread of this process that serves the device's peers.
pub fn block_service_thread() {
    let named = |task: &std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("rdma-soft"))
    };
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().filter(named);
    let threads: Vec<libc::pid_t> =
        tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect();
    assert!(!threads.is_empty(), "no thread has the name rdma-soft");
    threads.into_iter().for_each(system::block_thread);
    std::thread::sleep(Duration::from_millis(20));
}

/// Forks a child that uses its copy of the connection, and runs its destructors. Returns whether the child ended well.
pub fn fork_and_drop(connection: &Connection) -> bool {
    system::fork_and_run(|| {
        let _ = connection.end.send_inline(5, b"from the forked child");
        connection.queue.poll(&mut [WorkCompletion::EMPTY; 4]);
        connection.end.pair.to_error();
        // SAFETY:
        // - the value is valid, and is read once more in this forked child only, which ends without a use of it; and
        // - the parent process has a copy of its own.
        drop(unsafe { std::ptr::read(connection) });
    })
}

/// Sends messages from `count` memories. Each message names its own memory, so that the peer can READ it.
pub fn send_from_many_segments(connection: &Connection, count: usize) {
    let mut kept = Vec::new();
    let mut completions = [WorkCompletion::EMPTY; 16];
    for _ in 0..count {
        let memory = std::sync::Arc::new(HostMemory::shared(16 << 10, 4096).unwrap());
        let region = connection.domain.register(memory, ALL).unwrap();
        let name = format!("{} {} ", region.memory().address(), region.rkey().0);
        region.memory().copy_in(0, name.as_bytes()).unwrap();
        let data = [segment(&region, 0, ROOM)];
        let operation = tonic_rdma_verbs::Operation::Send {
            data: tonic_rdma_verbs::Payload::Registered(&data),
            immediate: None,
        };
        kept.push(region);
        if connection.end.post(SENT, operation).is_err() {
            return;
        }
        let mut sent = false;
        while !sent {
            let count = connection.queue.poll(&mut completions);
            for completion in &completions[..count] {
                if completion.status != CompletionStatus::Success {
                    return;
                }
                if completion.wr_id == SENT {
                    sent = true;
                } else {
                    connection.end.post_receive(completion.wr_id);
                }
            }
            std::thread::yield_now();
        }
    }
    crate::neighbour::poll_until_end(connection);
}

/// Holds 1 000 connections to the sockets `names`, and keeps making them anew. Two of three send garbage, and one of them sends descriptors
/// with it.
///
/// If `lingering` is set, the descriptors are of TCP sockets with unsent bytes. The last close of such a socket takes a long time.
pub fn knock(names: &str, lingering: bool) {
    const HELD: usize = 1000;
    crate::process::report("ready");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut unread = std::collections::VecDeque::new();
    let garbage: Vec<u8> = (0..4096).map(|_| fastrand::u8(..)).collect();
    let null = std::fs::File::open("/dev/null").unwrap();
    let mut held = std::collections::VecDeque::new();
    for round in 0usize.. {
        for name in names.split(' ') {
            let address = match name.strip_prefix('@') {
                Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap(),
                None => SocketAddrUnix::new(name).unwrap(),
            };
            for kind in [SocketType::SEQPACKET, SocketType::STREAM] {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let Ok(socket) = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None) else {
                    break;
                };
                if rustix::net::connect(&socket, &address).is_err() {
                    continue;
                }
                let mut files = vec![null.as_fd(); 16];
                let lingers = (lingering && round % 3 == 1).then(|| lingering_socket(&listener));
                if let Some((socket, _)) = &lingers {
                    files = vec![socket.as_fd()];
                }
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                if round % 3 == 1 {
                    control.push(SendAncillaryMessage::ScmRights(&files));
                }
                if round % 3 != 0 {
                    let bytes = &garbage[..fastrand::usize(1..200)];
                    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                    let _ = rustix::net::sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, flags);
                }
                held.push_back(socket);
                unread.extend(lingers.map(|(_, reader)| reader));
                if unread.len() > HELD {
                    unread.pop_front();
                }
            }
        }
        if held.len() > HELD {
            held.drain(..10);
        }
        if round % 16 == 0 {
            std::thread::yield_now();
        }
    }
}

/// Returns a TCP socket whose last close waits until the other end, which is returned, too, is closed.
fn lingering_socket(listener: &std::net::TcpListener) -> (std::net::TcpStream, std::net::TcpStream) {
    let mut socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (reader, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(100))).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket, reader)
}
