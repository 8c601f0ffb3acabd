//! What two devices tell one another: the address of a queue pair, which its user passes on, and the messages
//! on the devices' socket, requests for descriptors and replies, one datagram each.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::received::Received;
use crate::soft::{closer, system};
use crate::versions::Versions;
use crate::{Access, QueuePairAddress, VerbsError};

/// Descriptors of one message.
const DESCRIPTORS: usize = 1;

/// A request for the descriptors of an object. `number` and `token` are those of a queue pair, and the object
/// must belong to that queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The reply carries this number, so that a late reply is not mistaken for the reply to the next request.
    pub(crate) sequence: u64,
    pub(crate) number: u32,
    pub(crate) token: u64,
    pub(crate) object: Object,
}

/// The object that a request asks for; or its message or question, if it asks for no object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Object {
    /// The queue pair's end, for the queue pair with the token `requester`. An end is given once.
    End { requester: u64 },
    /// The device's table of regions.
    Table,
    /// No object: the connection is to wake the poller of one of the queue pair's completion queues from now
    /// on. The reply says that it does.
    EventSocket(u64),
    /// No object: the device is to carry out the records for the queue pair, because no thread of its process
    /// does. There is no reply.
    Nothing,
    /// No object: the sender offers its segment `id` of `length` bytes, whose descriptor comes with the
    /// request, to the queue pair's process. There is no reply.
    Offer { id: u64, length: u64 },
    /// No object: the memory of the segment that the sender offered is gone. There is no reply.
    Withdraw { id: u64 },
    /// No object: the sender has mapped the segment that this process offered. There is no reply.
    Mapped { id: u64 },
    /// No object: the sender does not have the segment mapped any more. There is no reply.
    Unmapped { id: u64 },
    /// No object: the sender needs none of its segments to be mapped any more. The reply says that they are
    /// not.
    Leave,
    /// No object: the reply says whether the queue pair waits for its peer, so that its end has not been
    /// given yet. The question changes nothing.
    Waits,
}

impl Object {
    /// Returns whether a request for this object has a reply.
    pub(crate) fn has_reply(self) -> bool {
        matches!(self, Self::End { .. } | Self::Table | Self::EventSocket(_) | Self::Leave | Self::Waits)
    }
}

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) sequence: u64,
    pub(crate) answer: Answer,
}

/// The content of a reply, without its descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The end, and the attributes of its owner.
    End(EndAnswer),
    /// Any other object.
    Object,
    /// There is no such queue pair, the token is wrong, the object belongs to another queue pair, or the end
    /// was already given.
    Refused,
}

/// The attributes of a queue pair that its peer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndAnswer {
    pub(crate) access: Access,
    /// Whether the owner lets this peer map its memory for reading.
    pub(crate) shares_memory: bool,
    /// Bytes of the ring.
    pub(crate) ring: u64,
    pub(crate) domain: u64,
    /// The completion queues of its sends and of its receives.
    pub(crate) send_queue: u64,
    pub(crate) receive_queue: u64,
}

/// The sequence number of [`Object::Leave`]. Requests that a thread waits for have greater numbers.
pub(crate) const LEAVE: u64 = 0;

const REQUEST: usize = 40;
const REPLY: usize = 72;

impl Request {
    fn encode(&self) -> [u8; REQUEST] {
        let (kind, object) = match self.object {
            Object::End { requester } => (0, requester),
            Object::Table => (1, 0),
            Object::EventSocket(id) => (2, id),
            Object::Nothing => (3, 0),
            Object::Offer { id, .. } => (4, id),
            Object::Withdraw { id } => (5, id),
            Object::Mapped { id } => (6, id),
            Object::Unmapped { id } => (7, id),
            Object::Leave => (8, 0),
            Object::Waits => (9, 0),
        };
        let mut bytes = [0; REQUEST];
        bytes[0] = VERSION;
        bytes[1] = kind;
        bytes[4..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.token.to_le_bytes());
        bytes[24..32].copy_from_slice(&object.to_le_bytes());
        if let Object::Offer { length, .. } = self.object {
            bytes[32..40].copy_from_slice(&length.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != REQUEST || bytes[0] != VERSION {
            return None;
        }
        let object = u64_at(bytes, 24);
        let object = match bytes[1] {
            0 => Object::End { requester: object },
            1 => Object::Table,
            2 => Object::EventSocket(object),
            3 => Object::Nothing,
            4 => Object::Offer { id: object, length: u64_at(bytes, 32) },
            5 => Object::Withdraw { id: object },
            6 => Object::Mapped { id: object },
            7 => Object::Unmapped { id: object },
            8 => Object::Leave,
            9 => Object::Waits,
            _ => return None,
        };
        Some(Self { sequence: u64_at(bytes, 8), number: u32_at(bytes, 4), token: u64_at(bytes, 16), object })
    }
}

impl Reply {
    fn encode(&self) -> [u8; REPLY] {
        let mut bytes = [0; REPLY];
        bytes[..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[9] = VERSION;
        match &self.answer {
            Answer::Refused => bytes[8] = 0,
            Answer::Object => bytes[8] = 1,
            Answer::End(end) => {
                bytes[8] = 2;
                bytes[10] = end.access.bits();
                bytes[11] = u8::from(end.shares_memory);
                bytes[16..24].copy_from_slice(&end.ring.to_le_bytes());
                bytes[24..32].copy_from_slice(&end.domain.to_le_bytes());
                bytes[32..40].copy_from_slice(&end.send_queue.to_le_bytes());
                bytes[40..48].copy_from_slice(&end.receive_queue.to_le_bytes());
            }
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != REPLY || bytes[9] != VERSION {
            return None;
        }
        let answer = match bytes[8] {
            0 => Answer::Refused,
            1 => Answer::Object,
            2 => Answer::End(EndAnswer {
                access: Access::from_bits_truncate(bytes[10]),
                shares_memory: bytes[11] == 1,
                ring: u64_at(bytes, 16),
                domain: u64_at(bytes, 24),
                send_queue: u64_at(bytes, 32),
                receive_queue: u64_at(bytes, 40),
            }),
            _ => return None,
        };
        Some(Self { sequence: u64_at(bytes, 0), answer })
    }
}

/// Sends a request, and a descriptor with it. Fails instead of waiting.
pub(crate) fn send_request(
    socket: impl AsFd,
    request: &Request,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    send(socket, &request.encode(), fd.as_slice())
}

fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(())
}

/// Receives a request and its descriptor. Returns `None` at the end of the connection, and an error for other
/// data.
pub(crate) fn receive_request(socket: impl AsFd) -> io::Result<Option<(Request, Option<Received>)>> {
    let mut bytes = [0u8; REQUEST + 1];
    let (length, fd) = receive(socket, &mut bytes)?;
    let invalid = |reason| Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    if length == 0 {
        return Ok(None);
    }
    let Some(request) = Request::decode(&bytes[..length]) else {
        return Err(not_understood("request", &bytes[..length], REQUEST, 0));
    };
    if fd.is_some() && !matches!(request.object, Object::Offer { .. }) {
        return invalid("a descriptor that no device sends");
    }
    Ok(Some((request, fd)))
}

/// Receives a message: the number of bytes, and the descriptor, if there is one. Only one thread at a time
/// receives from a socket.
///
/// A message with more than one descriptor is an error of the kind `InvalidData`: the message stays in the
/// queue, and the caller hangs up. A descriptor also stays there, with another error, if many of its peer are
/// not closed yet, or if this process has no room for it.
///
/// If this process received the message without room for its descriptors, the kernel would close the rest in
/// this thread, which can block (see [`closer`]). If it had room for all, a peer would fill it with
/// descriptors. Therefore this function peeks first: the queue still holds the descriptors then, so the
/// kernel closes none of them.
pub(crate) fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Option<Received>)> {
    let invalid = |reason| Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    let (_, flags) = peek(&socket, bytes)?;
    let mut descriptor = None;
    if flags.contains(ReturnFlags::CTRUNC) {
        let source = system::source(&socket)?;
        if closer::refuses(source) {
            return Err(io::Error::other("too many descriptors of the peer are not closed yet"));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | RecvFlags::PEEK;
        let message = rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
        let rights = control.drain().filter_map(|part| match part {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        // The kernel rounds the room for one descriptor up to two.
        let mut fds: Vec<_> = rights.flatten().map(|fd| Received::new(fd, Some(source))).collect();
        if fds.is_empty() {
            return Err(io::Error::other("no room for the peer's descriptor: raise the limit on open files"));
        }
        if fds.len() > DESCRIPTORS || message.flags.contains(ReturnFlags::CTRUNC) {
            return invalid("several descriptors in one message, which no device sends");
        }
        descriptor = fds.pop();
    }
    let (length, _) = rustix::net::recv(&socket, bytes, RecvFlags::DONTWAIT)?;
    Ok((length, descriptor))
}

/// Peeks at the next message of a socket, which stays in the queue. Returns the number of bytes, and flags
/// with `CTRUNC` if the message has descriptors.
pub(crate) fn peek(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, ReturnFlags)> {
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let mut none = RecvAncillaryBuffer::default();
    let message = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut none, flags)?;
    Ok((message.bytes, message.flags))
}

/// Sends a reply, and a descriptor with it. Fails instead of waiting.
pub(crate) fn send_reply(socket: impl AsFd, reply: &Reply, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send(socket, &reply.encode(), fds)
}

/// Receives a reply and its descriptor.
pub(crate) fn receive_reply(socket: impl AsFd) -> io::Result<(Reply, Option<Received>)> {
    let mut bytes = [0u8; REPLY];
    let (length, fd) = receive(socket, &mut bytes)?;
    if length == 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer's device has gone"));
    }
    match Reply::decode(&bytes[..length]) {
        Some(reply) => Ok((reply, fd)),
        None => Err(not_understood("reply", &bytes[..length], REPLY, 9)),
    }
}

/// Returns the error for bytes that are not `what`. A message of another version has its version at `at` too.
fn not_understood(what: &str, bytes: &[u8], length: usize, at: usize) -> io::Error {
    let reason = match bytes.get(at) {
        Some(version) if bytes.len() == length && *version != VERSION => {
            format!("the peer's device sent a {what} of version {version}, this device has {VERSIONS}")
        }
        _ => format!("the peer's device sent no {what} that we know"),
    };
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// The versions of the layout of shared memory and of the messages between devices that this device speaks.
/// Every change of either increments the newest one. Older ones than 5 were never released. A device that
/// speaks two versions makes a queue pair of each, the newer one first, and its user offers both to the peer.
pub const VERSIONS: Versions = Versions::only(5);
/// The version of this device.
pub(crate) const VERSION: u8 = VERSIONS.newest as u8;

const MAGIC: u8 = b's';
const LENGTH: usize = 34;

/// The address of a queue pair: the device and the number. The token is a secret, so that a process without
/// the address can't reach the queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) device: DeviceId,
    pub(crate) number: u32,
    pub(crate) token: u64,
}

/// The identity of a device: a random number. The rest is information. The process number is that of the
/// device's pid namespace, so it may be the number of another process here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DeviceId {
    pub(crate) process: u32,
    pub(crate) nonce: u64,
    /// The directory in which the device has its socket (`RDMA_SOFT_DIR`): a number that is made of the
    /// numbers of the file system and the file; 0 if the socket is in the abstract namespace.
    pub(crate) directory: u64,
}

impl DeviceId {
    /// Returns the name of the device's socket in the abstract namespace.
    pub(crate) fn socket_name(self) -> String {
        format!("tonic-rdma-soft-{}-{:016x}", self.process, self.nonce)
    }
}

impl Address {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LENGTH);
        bytes.extend([MAGIC, VERSION]);
        bytes.extend(self.device.process.to_le_bytes());
        bytes.extend(self.device.nonce.to_le_bytes());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.token.to_le_bytes());
        bytes.extend(self.device.directory.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(address: &QueuePairAddress) -> Result<Self, VerbsError> {
        let bytes = address.as_bytes();
        if bytes.first() != Some(&MAGIC) {
            return Err(VerbsError::bad_address("it is not the address of a soft device"));
        }
        let version = bytes.get(1).copied().unwrap_or(0);
        if !VERSIONS.speaks(version.into()) {
            return Err(VerbsError::bad_address(format!(
                "the peer's soft device has version {version} of the layout, this one has {VERSIONS}: use one version of this library"
            )));
        }
        let Ok(bytes) = <&[u8; LENGTH]>::try_from(bytes) else {
            return Err(VerbsError::bad_address(format!("{} bytes, not {LENGTH}", bytes.len())));
        };
        let device =
            DeviceId { process: u32_at(bytes, 2), nonce: u64_at(bytes, 6), directory: u64_at(bytes, 26) };
        if device.process == 0 {
            return Err(VerbsError::bad_address("process 0"));
        }
        Ok(Self { device, number: u32_at(bytes, 14), token: u64_at(bytes, 18) })
    }
}

impl From<Address> for QueuePairAddress {
    fn from(address: Address) -> Self {
        const { assert!(LENGTH <= QueuePairAddress::MAX_LENGTH) };
        QueuePairAddress::new(address.encode()).unwrap_or_else(|| unreachable!())
    }
}

/// Returns the little-endian number at `offset`; 0 beyond the end.
pub(crate) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

/// Returns the little-endian number at `offset`; 0 beyond the end.
pub(crate) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_replies_survive_the_round_trip() {
        for object in [
            Object::End { requester: 9 },
            Object::Table,
            Object::EventSocket(u64::MAX),
            Object::Nothing,
            Object::Offer { id: 1, length: u64::MAX },
            Object::Withdraw { id: 2 },
            Object::Mapped { id: 3 },
            Object::Unmapped { id: 4 },
            Object::Leave,
            Object::Waits,
        ] {
            let request = Request { sequence: 3, number: 4, token: 5, object };
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        let end = EndAnswer {
            access: Access::REMOTE_READ,
            shares_memory: true,
            ring: 1 << 16,
            domain: 11,
            send_queue: 12,
            receive_queue: 14,
        };
        for answer in [Answer::Refused, Answer::Object, Answer::End(end)] {
            let reply = Reply { sequence: 1 << 40, answer };
            assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        }
    }

    #[test]
    fn garbage_is_no_message() {
        assert_eq!(Request::decode(&[]), None);
        assert_eq!(Request::decode(&[0xff; REQUEST]), None);
        assert_eq!(Request::decode(&[VERSION; REQUEST + 1]), None);
        assert_eq!(Reply::decode(&[0xff; REPLY]), None);
        assert_eq!(Reply::decode(&[VERSION; REPLY - 1]), None);
    }
}

#[cfg(test)]
mod address_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn sample() -> Address {
        let device = DeviceId { process: 4711, nonce: 0x0123_4567_89ab_cdef, directory: 99 };
        Address { device, number: 17, token: u64::MAX - 3 }
    }

    #[test]
    fn survives_the_round_trip() {
        let bytes = QueuePairAddress::from(sample());
        assert_eq!(Address::decode(&bytes).unwrap(), sample());
    }

    #[test]
    fn refuses_every_other_length_and_header() {
        let good = sample().encode();
        for length in (0..60).filter(|length| *length != good.len()) {
            let mut bytes = good.clone();
            bytes.resize(length, 7);
            assert!(Address::decode(&QueuePairAddress::new(bytes).unwrap()).is_err(), "{length}");
        }
        let mut other = good;
        other[0] ^= 1;
        assert!(Address::decode(&QueuePairAddress::new(other).unwrap()).is_err());
    }

    #[test]
    fn another_version_is_an_error_with_both_numbers() {
        for version in [0, VERSION - 1, VERSION + 1] {
            // Another version may have another length.
            for length in [2, LENGTH, 60] {
                let mut bytes = sample().encode();
                bytes[1] = version;
                bytes.resize(length, 7);
                let error = Address::decode(&QueuePairAddress::new(bytes).unwrap()).unwrap_err().to_string();
                let both = format!("has version {version} of the layout, this one has {VERSION}:");
                assert!(error.contains(&both), "{error}");
            }
            let (ours, theirs) = rustix::net::socketpair(
                rustix::net::AddressFamily::UNIX,
                rustix::net::SocketType::SEQPACKET,
                rustix::net::SocketFlags::empty(),
                None,
            )
            .unwrap();
            let request = Request { sequence: 1, number: 2, token: 3, object: Object::Table };
            let mut request = request.encode();
            request[0] = version;
            send(&theirs, &request, &[]).unwrap();
            let error = receive_request(&ours).map(|_| ()).unwrap_err().to_string();
            assert!(
                error.contains(&format!("a request of version {version}, this device has {VERSION}")),
                "{error}"
            );
            let mut reply = Reply { sequence: 1, answer: Answer::Object }.encode();
            reply[9] = version;
            send(&ours, &reply, &[]).unwrap();
            let error = receive_reply(&theirs).map(|_| ()).unwrap_err().to_string();
            assert!(
                error.contains(&format!("a reply of version {version}, this device has {VERSION}")),
                "{error}"
            );
        }
    }
}
