//! The messages of the negotiation, which two sides exchange over TCP before they use RDMA.
//!
//! Each message has a frame:
//!
//! ```text
//!  0                       8            10           12                     16
//!  ├── magic ──────────────┼── version ─┼── type ────┼── length of body ────┼── body ──
//! ```
//!
//! The first byte of the magic is neither an ASCII letter nor a TLS record type. So a stock HTTP/2 or TLS
//! server refuses a hello at once, and a stock client is never taken for a peer with this transport.
//!
//! The version in the frame is that of the layout of these messages, [`LAYOUT`]. The version of the protocol is
//! agreed on: the client says the newest one that it speaks, and the server answers with the newest one that it
//! speaks too. Both numbers lie where ends of version 3 have unknown capabilities, which they ignore.

use bytes::{Buf, BufMut};
use tonic_rdma_verbs::unstable::Versions;

/// The first bytes of every message of a negotiation.
pub const MAGIC: [u8; 8] = *b"\xd5tonRDMA";
/// The version of the layout of these messages. A newer version of the protocol may append to the client
/// hello, and changes nothing else here, because ends of older versions must read it.
pub const LAYOUT: u16 = 3;
/// The versions of the protocol that this end speaks: its own, and the one before.
///
/// | version | what is new |
/// |---|---|
/// | 4 | native calls have a window for the whole connection, beside the streams' |
/// | 3 | the first version that the next one speaks with |
pub const VERSIONS: Versions = Versions { oldest: 3, newest: 4 };
/// The first version in which native calls have windows of the connection.
pub const CONNECTION_WINDOWS: u32 = 4;
/// The capability of native calls: the connection carries messages of calls instead of a byte stream.
pub const NATIVE_CALLS: u32 = 1;
/// In a hello without offers: the client has a device, and no memory for a connection, because its budget is used
/// up. A server that does not know this says that the client has no device.
pub const LACKS_MEMORY: u32 = 2;
/// In a hello without offers: the client has no file descriptors for a device.
pub const LACKS_DESCRIPTORS: u32 = 4;
/// The longest body of a message, in bytes.
pub const MAX_BODY: usize = 4096;

const HEADER: usize = 16;
const MAX_OFFERS: usize = 8;
const MAX_NAME: usize = 64;
const MAX_ADDRESS: usize = 256;
const MAX_REASON: usize = 256;
/// The bits of capabilities. The other bits have a version.
const CAPABILITIES: u32 = 0x00ff_ffff;

/// A message of the negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The first message, from the client.
    ClientHello(ClientHello),
    /// The answer, from the server.
    ServerHello(Answer),
    /// The last message, from each side: the value that the sender read in the receiver's memory.
    Confirm(Confirm),
}

/// The client's process, and the queue pairs that it offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientHello {
    /// The process of the client.
    pub identity: HostIdentity,
    /// The newest version of the protocol that the client speaks, at least 3.
    pub newest: u8,
    /// What the client wants beside a byte stream: 24 bits such as [`NATIVE_CALLS`]. Unknown bits are
    /// ignored.
    pub capabilities: u32,
    /// The queue pairs that can be connected, the best first; at most 8.
    pub offers: Vec<DeviceOffer>,
}

/// The host, the network namespace and the user of a process. The software device connects only processes
/// that can share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostIdentity {
    /// The random number of the kernel's boot; all zero if unknown.
    pub boot_id: [u8; 16],
    /// The inode of the network namespace; zero if unknown.
    pub network_namespace: u64,
    /// The effective user.
    pub uid: u32,
    /// The process id.
    pub pid: u32,
}

/// A queue pair that can be connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOffer {
    /// The provider, such as `soft`; at most 64 bytes.
    pub provider: String,
    /// The device, such as `soft0`; at most 64 bytes.
    pub device: String,
    /// The address of the queue pair, in the provider's format; at most 256 bytes.
    pub queue_pair: Vec<u8>,
    /// The number of receive buffers that are posted.
    pub receive_slots: u32,
    /// The length of each receive buffer, in bytes.
    pub slot_size: u32,
}

/// The decision of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The server took an offer.
    Accept {
        /// The index of the offer in the client's list.
        offer: u8,
        /// The address of the server's queue pair; at most 256 bytes.
        queue_pair: Vec<u8>,
        /// The number of receive buffers that are posted.
        receive_slots: u32,
        /// The length of each receive buffer, in bytes.
        slot_size: u32,
        /// The version of the protocol for this connection, at least 3.
        version: u8,
        /// The client's capabilities that the server has too, for this connection.
        capabilities: u32,
    },
    /// No RDMA. Both sides go on over this TCP connection.
    Decline {
        /// The reason; at most 256 bytes.
        reason: String,
    },
}

/// The result of connecting the queue pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Confirm {
    /// The queue pairs are connected.
    Connected {
        /// The value that the sender read in the receiver's memory, if the device works by shared memory.
        nonce: Option<u64>,
    },
    /// The queue pairs are not connected. Both sides go on over this TCP connection.
    Failed {
        /// The reason; at most 256 bytes.
        reason: String,
    },
}

/// A fault in a message of the negotiation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// The message does not begin with the magic.
    #[error("not a hello of this transport")]
    Magic,
    /// The peer has another version of the protocol.
    #[error("a hello of layout {seen}, this end reads layout {LAYOUT}")]
    Version {
        /// The peer's version.
        seen: u16,
    },
    /// The type of the message is unknown.
    #[error("a message of unknown type {0}")]
    Type(u16),
    /// The body is longer than [`MAX_BODY`].
    #[error("a message of {0} bytes, of which {MAX_BODY} are allowed")]
    TooLong(u32),
    /// The body is too short or too long, or a number in it is out of range.
    #[error("malformed {field}")]
    Malformed {
        /// The part of the body.
        field: &'static str,
    },
}

impl Message {
    /// Returns the message's name, for errors.
    pub fn name(&self) -> &'static str {
        match self {
            Self::ClientHello(_) => "a client hello",
            Self::ServerHello(_) => "a server hello",
            Self::Confirm(_) => "a confirmation",
        }
    }

    /// Returns the message that the queue pairs are not connected, for this reason.
    pub(crate) fn failed(reason: &impl ToString) -> Self {
        Self::Confirm(Confirm::Failed { reason: reason.to_string() })
    }

    /// Returns the bytes of the message. Reasons that are too long are cut.
    ///
    /// # Errors
    /// A name, an address or a list is too long to be decoded again.
    pub fn encode(&self) -> Result<Vec<u8>, HelloError> {
        let mut body = Vec::with_capacity(512);
        let kind: u16 = match self {
            Self::ClientHello(hello) => {
                encode_client(hello, &mut body)?;
                1
            }
            Self::ServerHello(answer) => {
                encode_server(answer, &mut body)?;
                2
            }
            Self::Confirm(confirm) => {
                encode_confirm(confirm, &mut body);
                3
            }
        };
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.put_slice(&MAGIC);
        bytes.put_u16_le(LAYOUT);
        bytes.put_u16_le(kind);
        bytes.put_u32_le(body.len() as u32);
        bytes.put_slice(&body);
        Ok(bytes)
    }

    /// Reads the message at the start of `received`, if the whole message is there. Returns its length, too.
    ///
    /// # Errors
    /// The bytes can't be the start of a message.
    pub fn decode(received: &[u8]) -> Result<Option<(Self, usize)>, HelloError> {
        let start = received.len().min(MAGIC.len());
        if received[..start] != MAGIC[..start] {
            return Err(HelloError::Magic);
        }
        if received.len() < HEADER {
            return Ok(None);
        }
        let mut header = &received[MAGIC.len()..HEADER];
        let (version, kind, length) = (header.get_u16_le(), header.get_u16_le(), header.get_u32_le());
        if version != LAYOUT {
            return Err(HelloError::Version { seen: version });
        }
        if length as usize > MAX_BODY {
            return Err(HelloError::TooLong(length));
        }
        if !(1..=3).contains(&kind) {
            return Err(HelloError::Type(kind));
        }
        let end = HEADER + length as usize;
        let Some(body) = received.get(HEADER..end) else { return Ok(None) };
        let mut body = Body(body);
        let message = match kind {
            1 => Self::ClientHello(body.client()?),
            2 => Self::ServerHello(body.server()?),
            _ => Self::Confirm(body.confirm()?),
        };
        let may_have_more =
            matches!(&message, Self::ClientHello(hello) if u32::from(hello.newest) > VERSIONS.newest);
        if !body.0.is_empty() && !may_have_more {
            return Err(HelloError::Malformed { field: "end of the message" });
        }
        Ok(Some((message, end)))
    }
}

fn encode_client(hello: &ClientHello, body: &mut Vec<u8>) -> Result<(), HelloError> {
    body.put_slice(&hello.identity.boot_id);
    body.put_u64_le(hello.identity.network_namespace);
    body.put_u32_le(hello.identity.uid);
    body.put_u32_le(hello.identity.pid);
    body.put_u32_le(with_version(hello.capabilities, hello.newest));
    if hello.offers.len() > MAX_OFFERS {
        return Err(HelloError::Malformed { field: "number of offers" });
    }
    body.put_u8(hello.offers.len() as u8);
    for offer in &hello.offers {
        put(body, offer.provider.as_bytes(), MAX_NAME, "provider")?;
        put(body, offer.device.as_bytes(), MAX_NAME, "device")?;
        put(body, &offer.queue_pair, MAX_ADDRESS, "queue pair address")?;
        body.put_u32_le(offer.receive_slots);
        body.put_u32_le(offer.slot_size);
    }
    Ok(())
}

fn encode_server(answer: &Answer, body: &mut Vec<u8>) -> Result<(), HelloError> {
    match answer {
        Answer::Accept { offer, queue_pair, receive_slots, slot_size, version, capabilities } => {
            body.put_u8(1);
            body.put_u8(*offer);
            put(body, queue_pair, MAX_ADDRESS, "queue pair address")?;
            body.put_u32_le(*receive_slots);
            body.put_u32_le(*slot_size);
            body.put_u32_le(with_version(*capabilities, *version));
        }
        Answer::Decline { reason } => {
            body.put_u8(0);
            put_reason(body, reason);
        }
    }
    Ok(())
}

fn encode_confirm(confirm: &Confirm, body: &mut Vec<u8>) {
    match confirm {
        Confirm::Failed { reason } => {
            body.put_u8(0);
            put_reason(body, reason);
        }
        Confirm::Connected { nonce: None } => body.put_u8(1),
        Confirm::Connected { nonce: Some(nonce) } => {
            body.put_u8(2);
            body.put_u64_le(*nonce);
        }
    }
}

/// Returns capabilities and a version as one number, in which version 3 is 0.
fn with_version(capabilities: u32, version: u8) -> u32 {
    let version = if u16::from(version) == LAYOUT { 0 } else { version };
    (capabilities & CAPABILITIES) | (u32::from(version) << CAPABILITIES.count_ones())
}

fn put(body: &mut Vec<u8>, bytes: &[u8], most: usize, field: &'static str) -> Result<(), HelloError> {
    if bytes.len() > most {
        return Err(HelloError::Malformed { field });
    }
    body.put_u16_le(bytes.len() as u16);
    body.put_slice(bytes);
    Ok(())
}

fn put_reason(body: &mut Vec<u8>, reason: &str) {
    let cut = (0..=reason.len().min(MAX_REASON)).rev().find(|&end| reason.is_char_boundary(end)).unwrap_or(0);
    body.put_u16_le(cut as u16);
    body.put_slice(&reason.as_bytes()[..cut]);
}

/// The rest of a body that is being read.
struct Body<'a>(&'a [u8]);

impl Body<'_> {
    fn client(&mut self) -> Result<ClientHello, HelloError> {
        let mut boot_id = [0; 16];
        boot_id.copy_from_slice(self.bytes(16, "boot id")?);
        let identity = HostIdentity {
            boot_id,
            network_namespace: self.u64("network namespace")?,
            uid: self.u32("uid")?,
            pid: self.u32("pid")?,
        };
        let (capabilities, newest) = self.capabilities()?;
        let count = usize::from(self.u8("number of offers")?);
        if count > MAX_OFFERS {
            return Err(HelloError::Malformed { field: "number of offers" });
        }
        let offers = (0..count).map(|_| self.offer()).collect::<Result<_, _>>()?;
        Ok(ClientHello { identity, newest, capabilities, offers })
    }

    fn offer(&mut self) -> Result<DeviceOffer, HelloError> {
        Ok(DeviceOffer {
            provider: self.text(MAX_NAME, "provider")?,
            device: self.text(MAX_NAME, "device")?,
            queue_pair: self.counted(MAX_ADDRESS, "queue pair address")?.to_vec(),
            receive_slots: self.u32("receive slots")?,
            slot_size: self.u32("slot size")?,
        })
    }

    fn server(&mut self) -> Result<Answer, HelloError> {
        match self.u8("verdict")? {
            0 => Ok(Answer::Decline { reason: self.text(MAX_REASON, "reason")? }),
            1 => {
                let offer = self.u8("offer")?;
                let queue_pair = self.counted(MAX_ADDRESS, "queue pair address")?.to_vec();
                let (receive_slots, slot_size) = (self.u32("receive slots")?, self.u32("slot size")?);
                let (capabilities, version) = self.capabilities()?;
                Ok(Answer::Accept { offer, queue_pair, receive_slots, slot_size, version, capabilities })
            }
            _ => Err(HelloError::Malformed { field: "verdict" }),
        }
    }

    fn confirm(&mut self) -> Result<Confirm, HelloError> {
        match self.u8("outcome")? {
            0 => Ok(Confirm::Failed { reason: self.text(MAX_REASON, "reason")? }),
            1 => Ok(Confirm::Connected { nonce: None }),
            2 => Ok(Confirm::Connected { nonce: Some(self.u64("nonce")?) }),
            _ => Err(HelloError::Malformed { field: "outcome" }),
        }
    }

    /// Reads capabilities and a version.
    fn capabilities(&mut self) -> Result<(u32, u8), HelloError> {
        let both = self.u32("capabilities")?;
        let capabilities = both & CAPABILITIES;
        match (both >> CAPABILITIES.count_ones()) as u8 {
            0 => Ok((capabilities, LAYOUT as u8)),
            1..=3 => Err(HelloError::Malformed { field: "version" }),
            version => Ok((capabilities, version)),
        }
    }

    fn bytes(&mut self, count: usize, field: &'static str) -> Result<&[u8], HelloError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(HelloError::Malformed { field })?;
        self.0 = rest;
        Ok(taken)
    }

    fn counted(&mut self, most: usize, field: &'static str) -> Result<&[u8], HelloError> {
        let count = usize::from(self.bytes(2, field)?.get_u16_le());
        if count > most {
            return Err(HelloError::Malformed { field });
        }
        self.bytes(count, field)
    }

    fn text(&mut self, most: usize, field: &'static str) -> Result<String, HelloError> {
        let bytes = self.counted(most, field)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| HelloError::Malformed { field })
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, HelloError> {
        Ok(self.bytes(1, field)?.get_u8())
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, HelloError> {
        Ok(self.bytes(4, field)?.get_u32_le())
    }

    fn u64(&mut self, field: &'static str) -> Result<u64, HelloError> {
        Ok(self.bytes(8, field)?.get_u64_le())
    }
}

#[cfg(test)]
#[path = "hello_tests.rs"]
mod tests;
