//! The ways to do harm, for the tests and for the bench `neighbours`. They know nothing of the layout of
//! shared memory: they find mappings and descriptors as the kernel lists them. Of the messages between
//! devices, they know the form of a request.
//!
//! Each way calls `harmed` when it has done harm for the first time, so that a test fails if its neighbour
//! does no harm.

use std::io::{IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::system;

/// Most descriptors of one message.
const MOST_DESCRIPTORS: usize = 253;
/// Bytes of a reply of a device that say to which request it belongs.
const SEQUENCE: usize = 8;
/// The kind of a request whose connection wakes a poller from then on.
const EVENT_SOCKET: u8 = 2;

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
pub fn scribble(what: Scribble, harmed: fn()) {
    let mut has_harmed = false;
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
                // The first word alone may end the connection, or this process.
                if rights.contains('w') && !std::mem::replace(&mut has_harmed, true) {
                    harmed();
                }
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

pub fn number(hex: &str) -> usize {
    usize::from_str_radix(hex, 16).unwrap_or_default()
}

/// Returns the open descriptors of this process that stand for `kind`, such as `/memfd:`.
pub fn descriptors(kind: &str) -> Vec<RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let wanted = entries.filter(|entry| {
        std::fs::read_link(entry.path()).is_ok_and(|target| target.to_string_lossy().contains(kind))
    });
    wanted.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(|&fd| fd > 2).collect()
}

/// Makes a descriptor of the wrong kind: `kind` is its name.
///
/// | name | the descriptor |
/// |---|---|
/// | `full-pipe`, `pipe-without-reader` | an end of a pipe that blocks, or fails, when it is written to |
/// | `tcp`, `locked-tcp` | a connected TCP socket; while a thread of this process sends for ever, all calls wait that take the socket's lock |
/// | `truncated`, `huge-pages`, `device` | memory whose length can change, or of huge pages, or `/dev/zero` |
pub fn wrong_descriptor(kind: &str) -> OwnedFd {
    match kind {
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
        "tcp" | "locked-tcp" => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            Box::leak(Box::new(listener.accept().unwrap()));
            if kind == "locked-tcp" {
                let copy = socket.try_clone().unwrap();
                std::thread::spawn(move || system::send_for_ever(&copy));
                // The thread has the lock for ever, from soon on.
                std::thread::sleep(Duration::from_millis(20));
            }
            socket.into()
        }
        "truncated" => {
            let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
            let memory = rustix::fs::memfd_create("unsealed", flags).unwrap();
            rustix::fs::ftruncate(&memory, 64 << 20).unwrap();
            memory
        }
        "huge-pages" => {
            let flags = rustix::fs::MemfdFlags::ALLOW_SEALING | rustix::fs::MemfdFlags::HUGETLB;
            // Creating the descriptor needs no huge page.
            let memory = rustix::fs::memfd_create("huge", flags).unwrap();
            let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
            let _ = rustix::fs::ftruncate(&memory, 64 << 20);
            let _ = rustix::fs::fcntl_add_seals(&memory, seals);
            memory
        }
        "device" => std::fs::OpenOptions::new().read(true).write(true).open("/dev/zero").unwrap().into(),
        other => panic!("no such kind of descriptor: {other}"),
    }
}

/// Replaces the memory that this process shares, and that is shorter than `length`, by a descriptor of the
/// wrong kind.
pub fn swap_memory(kind: &str, length: u64, harmed: fn()) {
    let replacement = wrong_descriptor(kind);
    let length_of = |fd: RawFd| std::fs::metadata(format!("/proc/self/fd/{fd}")).map_or(0, |file| file.len());
    let memories = descriptors("/memfd:").into_iter().filter(|&fd| length_of(fd) < length);
    let mut has_harmed = false;
    for memory in memories {
        system::replace_descriptor(replacement.as_fd(), memory);
        if !std::mem::replace(&mut has_harmed, true) {
            harmed();
        }
    }
}

/// Takes the place of the socket of this process's device, and passes the messages between the device and its
/// peers on, except for the wake-ups: the answer to a connection for wake-ups has a [`wrong_descriptor`] of
/// the kind `what`. After it, this process reads no wake-ups, and for `pipe-without-reader` it closes the
/// connection. With `replies`, it sends replies to no request without end, each with as many sockets that
/// linger as the kernel takes.
pub fn stand_between(what: &str, harmed: fn()) {
    let name = SocketAddrUnix::new_abstract_name(&fastrand::u128(..).to_le_bytes()).unwrap();
    let listener = system::take_listener(&name);
    let what: Arc<str> = what.into();
    std::thread::spawn(move || {
        loop {
            let _ = rustix::event::poll(&mut [PollFd::new(&listener, PollFlags::IN)], None);
            let Ok(peer) = rustix::net::accept(&listener) else { continue };
            let device = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            rustix::net::connect(&device, &name).unwrap();
            let (peer, device, what) = (Arc::new(peer), Arc::new(device), Arc::clone(&what));
            let wakes = Arc::new(AtomicBool::new(false));
            let (requester, asked, is_for_wakes) =
                (Arc::clone(&peer), Arc::clone(&device), Arc::clone(&wakes));
            std::thread::spawn(move || {
                // The wake-ups that follow are not read.
                while !is_for_wakes.load(Ordering::SeqCst) {
                    let note = |request: &mut [u8], _: &mut Vec<OwnedFd>| {
                        is_for_wakes.fetch_or(request.get(1) == Some(&EVENT_SOCKET), Ordering::SeqCst)
                    };
                    if pass_on(&requester, &asked, note).is_err() {
                        return;
                    }
                }
            });
            std::thread::spawn(move || {
                let change = |bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>| {
                    if &*what == "replies" {
                        harmed();
                        flood_with_replies(&peer, bytes);
                    } else if wakes.load(Ordering::SeqCst) {
                        descriptors.push(wrong_descriptor(&what));
                    }
                    !descriptors.is_empty() && wakes.load(Ordering::SeqCst)
                };
                while let Ok(changed) = pass_on(&device, &peer, change) {
                    if changed {
                        harmed();
                        if &*what == "pipe-without-reader" {
                            break;
                        }
                        // The connection stays open.
                        loop {
                            std::thread::park();
                        }
                    }
                }
                // The peer's device takes this process for dead.
                let _ = rustix::net::shutdown(&*peer, rustix::net::Shutdown::Both);
                let _ = rustix::net::shutdown(&*device, rustix::net::Shutdown::Both);
            });
        }
    });
}

/// Passes a message on, which `change` may change. Returns what `change` returned; an error at the end of a
/// connection.
fn pass_on(
    from: &impl AsFd,
    to: &impl AsFd,
    change: impl FnOnce(&mut [u8], &mut Vec<OwnedFd>) -> bool,
) -> Result<bool, Errno> {
    let mut bytes = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(from, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let rights = control.drain().filter_map(|part| match part {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    let mut descriptors: Vec<OwnedFd> = rights.flatten().collect();
    let bytes = bytes.get_mut(..received.bytes).filter(|bytes| !bytes.is_empty()).ok_or(Errno::PIPE)?;
    let changed = change(bytes, &mut descriptors);
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    match send(to, bytes, &descriptors, SendFlags::empty()) {
        // The kernel refuses descriptors for a peer that takes none.
        Err(Errno::PERM) => send(to, bytes, &[], SendFlags::empty())?,
        sent => sent?,
    }
    Ok(changed)
}

/// Sends a message with descriptors.
fn send(to: &impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>], flags: SendFlags) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    rustix::net::sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Sends replies like `reply`, for requests that nobody made, until `peer` hangs up.
fn flood_with_replies(peer: &impl AsFd, reply: &mut [u8]) {
    reply[..SEQUENCE].fill(0xff);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    loop {
        // The last close of all of them waits, so those of the next reply wait, too.
        let (socket, reader) = lingering_socket(&listener);
        Box::leak(Box::new(reader));
        if send(peer, reply, &[socket.as_fd(); MOST_DESCRIPTORS], SendFlags::empty()).is_err() {
            return;
        }
    }
}

/// A connection of its own to the device of a queue pair.
#[derive(Debug)]
pub struct Device {
    socket: OwnedFd,
    number: [u8; 4],
    token: [u8; 8],
}

/// A request. Those for an object have a reply.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// For the end of the queue pair.
    End = 0,
    /// For the table of regions.
    Table = 1,
    /// To carry out the records for the queue pair.
    Nothing = 3,
    /// To map a memory.
    Offer = 4,
}

impl Device {
    /// Connects to the device of the queue pair with this address.
    pub fn dial(address: &[u8]) -> Result<Self, Errno> {
        let process = u32::from_le_bytes(address[2..6].try_into().unwrap());
        let nonce = u64::from_le_bytes(address[6..14].try_into().unwrap());
        let name = format!("tonic-rdma-soft-{process}-{nonce:016x}");
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        let (number, token) = (address[14..18].try_into().unwrap(), address[18..26].try_into().unwrap());
        Ok(Self { socket, number, token })
    }

    /// Sends a request for the object `id` with a descriptor.
    pub fn ask(
        &self,
        version: u8,
        request: Request,
        id: u64,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Errno> {
        let mut bytes = [0; 40];
        bytes[..2].copy_from_slice(&[version, request as u8]);
        bytes[4..8].copy_from_slice(&self.number);
        bytes[16..24].copy_from_slice(&self.token);
        bytes[24..32].copy_from_slice(&id.to_le_bytes());
        bytes[32..40].copy_from_slice(&4096_u64.to_le_bytes());
        send(&self.socket, &bytes, fd.as_slice(), SendFlags::empty())
    }
}

/// Asks the device of the queue pair with this address for what it gives to no stranger, and for what it
/// gives to nobody without the secret of the queue pair. Returns what it gave.
pub fn ask_for_secrets(address: &[u8]) -> Vec<String> {
    let mut given = Vec::new();
    let mut device = Device::dial(address).unwrap();
    for (secret, request) in
        [("with", Request::Table), ("without", Request::Table), ("without", Request::End)]
    {
        if secret == "without" {
            device.token = fastrand::u64(..).to_le_bytes();
        }
        device.ask(address[1], request, 0, None).unwrap();
        // The reply says at the ninth byte what follows: nothing, if it is zero.
        let mut reply = [0; 72];
        let (length, _) = rustix::net::recv(&device.socket, &mut reply, RecvFlags::empty()).unwrap();
        if length != reply.len() || reply[SEQUENCE] != 0 {
            given.push(format!("{request:?} {secret} the secret"));
        }
    }
    given
}

/// Offers memory of the wrong kind, again and again, to the process of the queue pair with this address.
pub fn offer_memory(kind: &str, address: &[u8], harmed: fn()) {
    let memory = wrong_descriptor(kind);
    let device = Device::dial(address).unwrap();
    for id in 1.. {
        // The peer's device takes descriptors only from those that have named one of its queue pairs.
        device.ask(address[1], Request::Nothing, 0, None).unwrap();
        match device.ask(address[1], Request::Offer, id, Some(memory.as_fd())) {
            // The kernel refuses descriptors for a peer that takes none of strangers.
            Ok(()) | Err(Errno::PERM) => harmed(),
            Err(_) => return,
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Cuts off the memory of all memfds of this process, again and again.
pub fn truncate_memory() {
    loop {
        std::thread::sleep(Duration::from_millis(20));
        descriptors("/memfd:").into_iter().for_each(system::truncate);
    }
}

/// Makes all descriptors blocking, for all processes that share their open files, again and again.
pub fn make_everything_blocking(harmed: fn()) {
    let mut has_harmed = false;
    loop {
        let blocking = descriptors("").into_iter().filter(|&fd| system::make_blocking(fd)).count();
        if blocking > 0 && !std::mem::replace(&mut has_harmed, true) {
            harmed();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Stops the thread of this process that serves the device's peers.
pub fn block_service_thread() {
    let named = |task: &std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("rdma-soft"))
    };
    let threads = || -> Vec<libc::pid_t> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().filter(named);
        tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
    };
    // A thread gets its name a moment after its start.
    let threads = std::iter::repeat_with(threads).find(|threads| !threads.is_empty()).unwrap();
    threads.into_iter().for_each(system::block_thread);
    std::thread::sleep(Duration::from_millis(20));
}

/// Returns the names of the unix sockets on which a process listens; abstract ones begin with `@`.
pub fn listening_sockets(process: u32) -> Vec<String> {
    let links = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten();
    let links: Vec<String> = links
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .map(|target| target.to_string_lossy().into_owned())
        .collect();
    // Names may have any bytes.
    let table = std::fs::read(format!("/proc/{process}/net/unix")).unwrap();
    let table = String::from_utf8_lossy(&table);
    let listening = table.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let is_its = |inode: &str| links.contains(&format!("socket:[{inode}]"));
        (words.len() == 8 && words[3] == "00010000" && is_its(words[6])).then(|| words[7].to_owned())
    });
    listening.collect()
}

/// Returns the address of a name of [`listening_sockets`].
fn address_of(name: &str) -> SocketAddrUnix {
    match name.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap(),
        None => SocketAddrUnix::new(name).unwrap(),
    }
}

/// Fills the backlog of this process's device, whose thread accepts no connections. Returns what fills it.
pub fn fill_backlog() -> Vec<OwnedFd> {
    let names = listening_sockets(std::process::id());
    let connect = |_| {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        rustix::net::connect(&socket, &address_of(&names[0])).ok().map(|()| socket)
    };
    (0..).map_while(connect).collect()
}

/// Makes processes that hold many connections to the device of a queue pair, each of which names the queue
/// pair and its token.
pub fn hold_connections(processes: usize, connections: usize, address: &[u8]) {
    for _ in 0..processes {
        system::fork_off(|| {
            let device = |_| {
                Device::dial(address).inspect(|device| {
                    let _ = device.ask(address[1], Request::Nothing, 0, None);
                })
            };
            (0..connections).map(device).collect::<Vec<_>>()
        });
    }
}

/// How long the last close of a lingering socket waits for its other end.
const LINGER: Duration = Duration::from_secs(100);
/// Most connections that [`knock`] holds.
pub const KNOCKS: usize = 1000;

/// Holds 1 000 connections to the sockets `names`, and keeps making them anew. Two of three send garbage, and
/// one of them sends descriptors with it. Calls `counted` now and then with the number of messages with
/// descriptors that were sent, and that the kernel refused.
///
/// If `lingering` is set, the descriptors are of TCP sockets with unsent bytes. The last close of such a
/// socket takes a long time.
pub fn knock(names: &str, lingering: bool, counted: impl Fn(usize, usize)) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut unread = std::collections::VecDeque::new();
    let garbage: Vec<u8> = (0..4096).map(|_| fastrand::u8(..)).collect();
    let null = std::fs::File::open("/dev/null").unwrap();
    let mut held = std::collections::VecDeque::new();
    let (mut sent, mut refused) = (0_usize, 0);
    for round in 0usize.. {
        for name in names.split(' ') {
            let address = address_of(name);
            for kind in [SocketType::SEQPACKET, SocketType::STREAM] {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let Ok(socket) = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None) else {
                    break;
                };
                if rustix::net::connect(&socket, &address).is_err() {
                    continue;
                }
                let lingers = (lingering && round % 3 == 1).then(|| lingering_socket(&listener));
                let files = match (round % 3, &lingers) {
                    (1, Some((socket, _))) => vec![socket.as_fd()],
                    (1, None) => vec![null.as_fd(); 16],
                    _ => Vec::new(),
                };
                if round % 3 != 0 {
                    let bytes = &garbage[..fastrand::usize(1..200)];
                    match send(&socket, bytes, &files, SendFlags::DONTWAIT) {
                        Ok(()) if !files.is_empty() => sent += 1,
                        Err(Errno::PERM) => refused += 1,
                        _ => {}
                    }
                    if round % 3 == 1 && (sent + refused).is_power_of_two() {
                        counted(sent, refused);
                    }
                }
                held.push_back(socket);
                if let Some((socket, reader)) = lingers {
                    // If the message was refused, this is the last close, which must not wait.
                    let linger = (refused == 0).then_some(LINGER);
                    rustix::net::sockopt::set_socket_linger(&socket, linger).unwrap();
                    unread.push_back(reader);
                }
                if unread.len() > KNOCKS {
                    unread.pop_front();
                }
            }
        }
        if held.len() > KNOCKS {
            held.drain(..10);
        }
        if round % 16 == 0 {
            std::thread::yield_now();
        }
    }
}

/// Returns a TCP socket whose last close waits until the other end, which is returned, too, is closed.
fn lingering_socket(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (reader, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&socket, Some(LINGER)).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket, reader)
}
