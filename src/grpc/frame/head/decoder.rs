//! Reads heads.

use bytes::{Buf as _, Bytes};
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};

use super::{FIELD, op};
use crate::grpc::frame::violation::CallViolation;

/// A head that was read. Only heads of requests have a path and an authority.
#[derive(Clone, Debug, Default)]
pub(in crate::grpc) struct Decoded {
    pub(in crate::grpc) path: Option<PathAndQuery>,
    pub(in crate::grpc) authority: Option<Authority>,
    pub(in crate::grpc) headers: HeaderMap,
    /// How much the head counts.
    pub(in crate::grpc) counted: usize,
    /// The head has more fields than a `HeaderMap` holds, so `headers` lacks the rest. Its call has to end.
    pub(in crate::grpc) is_overfull: bool,
}

/// Reads the heads of one direction of a connection.
#[derive(Debug)]
pub(in crate::grpc) struct Decoder {
    table: Vec<Entry>,
    /// Bytes of the entries.
    bytes: usize,
    limits: TableLimits,
    /// The most that a head may count.
    head_bytes: usize,
    /// The latest heads of references only, with their meaning. As entries never change, such a head always means the same.
    known: Vec<Known>,
    /// Spares are missing.
    incomplete: bool,
}

/// A head of references only.
#[derive(Debug)]
struct Known {
    block: Box<[u8]>,
    head: Decoded,
    /// A clone, made in advance: after a message was sent, while the peer works.
    spare: Option<Decoded>,
}

/// The size of a decoder's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::grpc) struct TableLimits {
    pub(in crate::grpc) entries: usize,
    pub(in crate::grpc) bytes: usize,
}

#[derive(Debug)]
enum Entry {
    Path(PathAndQuery),
    Authority(Authority),
    Name(HeaderName),
    Field(HeaderName, HeaderValue),
}

impl Decoder {
    /// Most heads whose meaning is kept.
    const KNOWN: usize = 16;
    /// The longest head whose meaning is kept, in bytes.
    const KNOWN_LENGTH: usize = 96;

    pub(in crate::grpc) fn new(entries: u32, bytes: u32, head_bytes: u32) -> Self {
        let limits = TableLimits { entries: entries as usize, bytes: bytes as usize };
        let (table, known) = (Vec::new(), Vec::new());
        let head_bytes = head_bytes as usize;
        Self { table, bytes: 0, limits, head_bytes, known, incomplete: false }
    }

    /// Reads a head.
    ///
    /// # Errors
    /// The bytes are no head, or break a limit. Then the table may have changed, and the connection has to end.
    pub(in crate::grpc) fn decode(&mut self, block: &[u8]) -> Result<Decoded, CallViolation> {
        if block.len() <= Self::KNOWN_LENGTH
            && let Some(known) = self.known.iter_mut().find(|known| is_same(&known.block, block))
        {
            self.incomplete = true;
            return Ok(known.spare.take().unwrap_or_else(|| known.head.clone()));
        }
        let mut head = Decoded::default();
        let (mut rest, mut counted, mut only_references) = (block, 0, true);
        while let Some((&instruction, after)) = rest.split_first() {
            rest = after;
            let before = counted;
            if instruction == op::ENTRY {
                counted += self.apply(entry(&mut rest)?, &mut head)?;
            } else {
                only_references = false;
                counted += self.literal(instruction, &mut rest, &mut head)?;
            }
            debug_assert!(counted >= before + FIELD);
            if counted > self.head_bytes {
                return Err(CallViolation::HeadTooLong(self.head_bytes));
            }
        }
        head.counted = counted;
        if only_references && block.len() <= Self::KNOWN_LENGTH {
            self.known.truncate(Self::KNOWN - 1);
            self.known.insert(0, Known { block: block.into(), head: head.clone(), spare: None });
        }
        Ok(head)
    }

    /// Clones the known heads whose clones were taken. Call this when no answer waits for it.
    pub(in crate::grpc) fn prepare(&mut self) {
        if std::mem::take(&mut self.incomplete) {
            for Known { head, spare, .. } in &mut self.known {
                spare.get_or_insert_with(|| head.clone());
            }
        }
    }

    /// Adds an entry of the table to the head. Returns how much it counts.
    fn apply(&self, entry: u16, head: &mut Decoded) -> Result<usize, CallViolation> {
        Ok(match self.table.get(usize::from(entry)) {
            Some(Entry::Path(path)) => set_path(head, path.clone())?,
            Some(Entry::Authority(authority)) => set_authority(head, authority.clone())?,
            Some(Entry::Field(name, value)) => append(head, name.clone(), value.clone()),
            Some(Entry::Name(_)) | None => return Err(CallViolation::TableEntry(entry)),
        })
    }

    /// Carries out an instruction that has bytes. Returns how much they count.
    fn literal(
        &mut self,
        instruction: u8,
        rest: &mut &[u8],
        head: &mut Decoded,
    ) -> Result<usize, CallViolation> {
        let sensitive = instruction & op::SENSITIVE != 0;
        let instruction = instruction & !op::SENSITIVE;
        let (name, value) = match instruction {
            op::PATH | op::NEW_PATH if !sensitive => {
                let path = text(rest)?;
                let path: PathAndQuery =
                    PathAndQuery::try_from(path).map_err(|_| bad("a path that is none"))?;
                if instruction == op::NEW_PATH {
                    self.insert(Entry::Path(path.clone()), path.as_str().len())?;
                }
                return set_path(head, path);
            }
            op::AUTHORITY | op::NEW_AUTHORITY if !sensitive => {
                let authority = text(rest)?;
                let authority =
                    Authority::try_from(authority).map_err(|_| bad("an authority that is none"))?;
                if instruction == op::NEW_AUTHORITY {
                    self.insert(Entry::Authority(authority.clone()), authority.as_str().len())?;
                }
                return set_authority(head, authority);
            }
            op::FIELD | op::FIELD_NEW_NAME => {
                let name = name(text(rest)?)?;
                if instruction == op::FIELD_NEW_NAME {
                    self.insert(Entry::Name(name.clone()), name.as_str().len())?;
                }
                (name, value(rest, sensitive)?)
            }
            op::FIELD_OF_NAME => (self.name(rest)?, value(rest, sensitive)?),
            op::NEW_FIELD if !sensitive => {
                let (name, value) = (self.name(rest)?, value(rest, false)?);
                self.insert(Entry::Field(name.clone(), value.clone()), name.as_str().len() + value.len())?;
                (name, value)
            }
            _ => return Err(bad("an unknown instruction")),
        };
        Ok(append(head, name, value))
    }

    fn name(&self, rest: &mut &[u8]) -> Result<HeaderName, CallViolation> {
        let entry = entry(rest)?;
        match self.table.get(usize::from(entry)) {
            Some(Entry::Name(name)) => Ok(name.clone()),
            _ => Err(CallViolation::TableEntry(entry)),
        }
    }

    fn insert(&mut self, entry: Entry, length: usize) -> Result<(), CallViolation> {
        let TableLimits { entries, bytes } = self.limits;
        self.bytes += length + FIELD;
        if self.table.len() >= entries || self.bytes > bytes {
            return Err(CallViolation::TableFull { entries, bytes });
        }
        self.table.push(entry);
        Ok(())
    }
}

/// Returns whether two short blocks are equal. The bytes have arrived just now, and a comparison of the library's loads them in a way that
/// has to wait until they have left the store buffer.
fn is_same(known: &[u8], block: &[u8]) -> bool {
    let ((known, known_rest), (block, rest)) = (known.as_chunks::<4>(), block.as_chunks::<4>());
    known.len() == block.len()
        && known_rest.len() == rest.len()
        && known.iter().zip(block).all(|(one, other)| u32::from_ne_bytes(*one) == u32::from_ne_bytes(*other))
        && known_rest.iter().zip(rest).all(|(one, other)| one == other)
}

fn bad(what: &'static str) -> CallViolation {
    CallViolation::Head(what)
}

fn set_path(head: &mut Decoded, path: PathAndQuery) -> Result<usize, CallViolation> {
    let length = path.as_str().len() + FIELD;
    head.path.replace(path).map_or(Ok(length), |_| Err(bad("a second path")))
}

fn set_authority(head: &mut Decoded, authority: Authority) -> Result<usize, CallViolation> {
    let length = authority.as_str().len() + FIELD;
    head.authority.replace(authority).map_or(Ok(length), |_| Err(bad("a second authority")))
}

fn append(head: &mut Decoded, name: HeaderName, value: HeaderValue) -> usize {
    let length = name.as_str().len() + value.len() + FIELD;
    head.is_overfull = head.is_overfull || head.headers.try_append(name, value).is_err();
    length
}

/// Reads a number of two bytes: an entry, or the length of a text.
fn entry(rest: &mut &[u8]) -> Result<u16, CallViolation> {
    rest.try_get_u16_le().map_err(|_| bad("it is too short"))
}

fn split<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], CallViolation> {
    let (taken, after) = rest.split_at_checked(length).ok_or(bad("it is too short"))?;
    *rest = after;
    Ok(taken)
}

fn text<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], CallViolation> {
    let length = entry(rest)?;
    split(rest, length.into())
}

/// Returns the name. A clone of a common name counts no references.
fn name(name: &[u8]) -> Result<HeaderName, CallViolation> {
    Ok(match name {
        b"grpc-status" => HeaderName::from_static("grpc-status"),
        b"grpc-encoding" => HeaderName::from_static("grpc-encoding"),
        b"grpc-accept-encoding" => HeaderName::from_static("grpc-accept-encoding"),
        b"grpc-timeout" => HeaderName::from_static("grpc-timeout"),
        _ => HeaderName::from_bytes(name).map_err(|_| bad("a name that is none"))?,
    })
}

/// Reads a value. It is copied, because metadata may be kept much longer than the message that it came in. A clone of a common value
/// counts no references.
fn value(rest: &mut &[u8], sensitive: bool) -> Result<HeaderValue, CallViolation> {
    let length = rest.try_get_u32_le().map_err(|_| bad("it is too short"))?;
    let bytes = match split(rest, length as usize)? {
        b"application/grpc" => Bytes::from_static(b"application/grpc"),
        b"trailers" => Bytes::from_static(b"trailers"),
        b"0" => Bytes::from_static(b"0"),
        b"gzip" => Bytes::from_static(b"gzip"),
        b"identity" => Bytes::from_static(b"identity"),
        bytes => Bytes::copy_from_slice(bytes),
    };
    let mut value = HeaderValue::from_maybe_shared(bytes).map_err(|_| bad("a value that is none"))?;
    value.set_sensitive(sensitive);
    Ok(value)
}
