//! The actions of a hostile process.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::super::*;
use super::bytes::Bytes;
use super::victim::{Connected, GRANTED, Victim};
use crate::soft::peers::message::{self, Address, Object, Request};
use crate::soft::peers::received::Received;

/// Most sockets and descriptors that the hostile process holds in one input.
const SOCKETS: usize = 4;

/// A hostile process: its own writer, its sockets, and what it got from the victim.
pub(super) struct Attacker {
    core: Arc<Core>,
    writer: Writer,
    address: Address,
    sockets: Vec<OwnedFd>,
    /// Connections that wake the victim's pollers, if the victim takes them.
    events: Vec<OwnedFd>,
}

impl Attacker {
    pub(super) fn new(connected: &Connected) -> Self {
        let core = Arc::clone(&connected.hostile.core);
        let writer = Writer::new(core.end.ring_bytes(), core.end.key());
        let address = Address::decode(&connected.side.pair.local_address()).unwrap();
        Self { core, writer, address, sockets: Vec::new(), events: Vec::new() }
    }

    /// Returns the queue pair whose end the hostile process writes.
    pub(super) fn core(&self) -> Arc<Core> {
        Arc::clone(&self.core)
    }

    pub(super) fn act(&mut self, bytes: &mut Bytes<'_>, victim: &Victim, connected: &Connected) {
        match bytes.below(16) {
            0..7 => self.put(bytes, victim, connected),
            7 => self.set(PairEnd::FIRST_CHANGING + bytes.below(16), bytes.number()),
            8 => self.set(PairEnd::FIRST_OF_RING + bytes.index(512), bytes.number()),
            9 => {
                // Honest progress: all records of the victim are taken.
                let published = connected.side.core.published.load(Relaxed);
                self.set(16, published.wrapping_add(if bytes.byte() < 8 { bytes.number() } else { 0 }));
                self.set(17, u64::from(bytes.byte()));
            }
            10 => self.set(8 + bytes.below(2), u64::from(bytes.byte() % 20)),
            11 if bytes.byte() < 64 => {
                let values = random(bytes.number());
                for (index, word) in self.core.end.words().iter().enumerate().skip(PairEnd::FIRST_CHANGING) {
                    word.store(values(index), Relaxed);
                }
            }
            12 => self.offer(bytes, connected),
            13 => self.send_garbage(bytes),
            14 => self.wake(bytes),
            _ => self.ask(bytes),
        }
    }

    fn set(&self, index: usize, value: u64) {
        self.core.end.words()[index].store(value, Release);
    }

    /// Publishes a record that is close to a good one.
    fn put(&mut self, bytes: &mut Bytes<'_>, victim: &Victim, connected: &Connected) {
        let kind =
            [Kind::Send, Kind::Write, Kind::Write, Kind::Read, Kind::ReadData, Kind::Skip][bytes.below(6)];
        let choice = bytes.byte();
        let flags = match choice % 8 {
            0..4 => Flags::FIRST.with(Flags::LAST),
            4 => Flags::FIRST,
            5 => Flags::LAST,
            6 => Flags::FIRST.with(Flags::LAST).with(Flags::PULL),
            _ => Flags::default(),
        };
        let flags = flags.with_if(Flags::IMMEDIATE, choice & 64 != 0);
        let granted = victim.address() + GRANTED as u64;
        let address = match bytes.below(6) {
            0..3 => granted + bytes.number() % 4096,
            3 => granted.wrapping_sub(bytes.number()),
            4 => granted + 4096 - bytes.number() % 64,
            _ => bytes.number(),
        };
        let key = match bytes.below(8) {
            0..5 => connected.granted,
            5 => connected.all.rkey().0,
            6 => connected.side.region.rkey().0,
            _ => bytes.number() as u32,
        };
        let mut payload: Vec<u64> = vec![0x0101_0101_0101_0101; bytes.below(24)];
        if flags.contains(Flags::PULL) {
            let id = connected.hostile.memory().id();
            let mut addresses = Vec::new();
            for _ in 0..bytes.below(4) {
                let address = match bytes.below(4) {
                    0 => [bytes.number(), bytes.number(), bytes.number()],
                    1 => [id, MEMORY as u64 - bytes.number() % 64, 64],
                    _ => [id, bytes.number() % 1024, 1 + bytes.number() % 512],
                };
                addresses.extend(address);
            }
            payload = addresses;
        }
        let length = payload.len() as u64 * 8;
        let total = match bytes.below(6) {
            0 => bytes.number(),
            1 => length + bytes.number() % 64,
            _ if flags.contains(Flags::PULL) => {
                payload.chunks_exact(3).fold(0, |sum, address| address[2].wrapping_add(sum))
            }
            _ => length,
        };
        let short = length - u64::from(bytes.byte() % 8).min(length);
        let length = if bytes.byte() < 32 { short } else { length };
        let header = Header { kind, flags, length: length as u32, immediate: 7, address, key, total };
        if self.writer.reclaim(connected.side.core.end.taken_word()).is_err() {
            return;
        }
        let ring = self.core.end.ring();
        let Some(slot) = self.writer.reserve(ring, payload.len() as u64 * 8) else { return };
        for (word, value) in ring[slot.payload()..].iter().zip(&payload) {
            word.store(*value, Relaxed);
        }
        let start = slot.payload() - 5;
        self.writer.publish(ring, &slot, &header);
        // A few words of the record change afterwards.
        if bytes.byte() < 48 {
            for _ in 0..=bytes.below(3) {
                let index = start + bytes.below(12);
                if let Some(word) = ring.get(index) {
                    let value = bytes.number();
                    word.store(if bytes.byte() < 128 { value } else { word.load(Relaxed) ^ value }, Relaxed);
                }
            }
        }
    }

    /// Offers memory as an honest process does, or takes it back, through the table of segments of the
    /// victim.
    fn offer(&self, bytes: &mut Bytes<'_>, connected: &Connected) {
        let Some(segments) = connected.side.core.segments() else { return };
        let memory = connected.hostile.memory();
        if bytes.byte() < 64 {
            segments.unmap(memory.id());
        } else if let Some(fd) = memory.shared_fd().and_then(|fd| fd.try_clone_to_owned().ok()) {
            segments.map(memory.id(), MEMORY as u64, Received::new(fd, None));
        }
    }

    fn socket(&mut self, bytes: &mut Bytes<'_>) -> Option<usize> {
        let index = bytes.below(SOCKETS);
        if index < self.sockets.len() {
            return Some(index);
        }
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None)
                .unwrap();
        let name = SocketAddrUnix::new_abstract_name(self.address.device.socket_name().as_bytes()).unwrap();
        // The device's backlog may be full.
        rustix::net::connect(&socket, &name).ok()?;
        self.sockets.push(socket);
        Some(self.sockets.len() - 1)
    }

    fn send_garbage(&mut self, bytes: &mut Bytes<'_>) {
        let Some(index) = self.socket(bytes) else { return };
        let length = bytes.below(80);
        let mut content = vec![0; length];
        content.iter_mut().for_each(|byte| *byte = bytes.byte());
        let _ = rustix::net::send(&self.sockets[index], &content, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        if bytes.byte() < 64 {
            self.sockets.swap_remove(index);
        }
    }

    /// Floods the sockets that wake the victim's pollers.
    fn wake(&mut self, bytes: &mut Bytes<'_>) {
        for event in &self.events {
            for _ in 0..bytes.below(40) {
                let _ = rustix::net::send(event, &[0; 300], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            }
        }
        if bytes.byte() < 32 {
            self.events.pop();
        }
    }

    /// Sends a request of any kind, with a descriptor of any kind, and takes the answers that have come.
    fn ask(&mut self, bytes: &mut Bytes<'_>) {
        let Some(index) = self.socket(bytes) else { return };
        let id = match bytes.below(4) {
            0 => bytes.number(),
            1 => self.address.token,
            _ => u64::from(bytes.byte()),
        };
        let object = match bytes.below(10) {
            0 => Object::End { requester: id },
            1 => Object::Table,
            2 => Object::EventSocket(id),
            3 => Object::Nothing,
            4 => Object::Offer { id, length: if bytes.byte() < 128 { 8192 } else { bytes.number() } },
            5 => Object::Withdraw { id },
            6 => Object::Mapped { id },
            7 => Object::Unmapped { id },
            8 => Object::Leave,
            _ => Object::Waits,
        };
        let wrong = bytes.byte() < 32;
        let request = Request {
            sequence: bytes.number(),
            number: self.address.number ^ u32::from(wrong && bytes.byte() < 128),
            token: self.address.token ^ u64::from(wrong),
            object,
        };
        let descriptor = descriptor(bytes);
        let fd = descriptor.as_ref().map(AsFd::as_fd);
        let _ = message::send_request(&self.sockets[index], &request, fd);
        while message::receive_reply(&self.sockets[index]).is_ok() {}
        let _ = rustix::net::recv(&self.sockets[index], &mut [0; 8][..], RecvFlags::DONTWAIT);
        if matches!(object, Object::EventSocket(_)) {
            self.events.push(self.sockets.swap_remove(index));
            self.events.truncate(SOCKETS);
        }
    }
}

/// Returns a descriptor of a kind that the input chooses.
fn descriptor(bytes: &mut Bytes<'_>) -> Option<OwnedFd> {
    let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE;
    let seals = match bytes.below(12) {
        0 => return rustix::pipe::pipe().ok().map(|(read, _)| read),
        1 => return std::fs::File::open("/dev/zero").ok().map(OwnedFd::from),
        2 => return rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).ok(),
        3 => SealFlags::empty(),
        4 => SealFlags::SHRINK,
        5 => SealFlags::GROW | SealFlags::SHRINK,
        6..8 => sealed,
        _ => return None,
    };
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
    rustix::fs::ftruncate(&fd, 8192).ok()?;
    rustix::fs::fcntl_add_seals(&fd, seals).ok()?;
    Some(fd)
}
