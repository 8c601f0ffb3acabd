//! The compact form of headers and trailers.
//!
//! Each direction of a connection has a table of paths, authorities, names, and names with values. The
//! encoder adds entries until the table is full, and never removes one; the decoder follows. Headers are a
//! sequence of instructions:
//!
//! | instruction | followed by | meaning |
//! |---|---|---|
//! | 0 | entry (2) | the entry: a path, an authority, or a name with its value |
//! | 1, 2 | length (2), bytes | a path; 2 adds it to the table |
//! | 3, 4 | length (2), bytes | an authority; 4 adds it to the table |
//! | 5, 6 | length (2), name, length (4), value | a name with its value; 6 adds the name to the table |
//! | 7, 8 | entry of a name (2), length (4), value | a name with its value; 8 adds both to the table |
//!
//! 128 is added to 5, 6 and 7 if the value is sensitive. Such values do not enter the table.
//!
//! A name enters the table when it is used first, a value when it is used twice in succession. So values that
//! are different in each call do not fill the table.

use std::collections::{HashMap, VecDeque};

use bytes::{Buf as _, Bytes};
use foldhash::fast::RandomState;
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};

use crate::grpc::frame::CallViolation;

/// The headers of a request. The method is always POST and the scheme `http`, because gRPC uses no others
/// here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestHeaders {
    /// The path: `/package.Service/Method`.
    pub(crate) path: PathAndQuery,
    pub(crate) authority: Option<Authority>,
    /// The metadata, with gRPC's own fields such as `te`, `content-type` and `grpc-timeout`.
    pub(crate) headers: HeaderMap,
}

/// The bytes that a field counts beside its name and value (RFC 9113, 6.5.2).
const FIELD: usize = 32;

/// The instructions.
mod op {
    pub(super) const ENTRY: u8 = 0;
    pub(super) const PATH: u8 = 1;
    pub(super) const NEW_PATH: u8 = 2;
    pub(super) const AUTHORITY: u8 = 3;
    pub(super) const NEW_AUTHORITY: u8 = 4;
    pub(super) const FIELD: u8 = 5;
    pub(super) const FIELD_NEW_NAME: u8 = 6;
    pub(super) const FIELD_OF_NAME: u8 = 7;
    pub(super) const NEW_FIELD: u8 = 8;
    pub(super) const SENSITIVE: u8 = 0x80;
}

/// Returns how much fields count.
pub(in crate::grpc) fn fields_length(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD).sum()
}

impl RequestHeaders {
    /// Returns how much the headers count.
    pub(in crate::grpc) fn counted_length(&self) -> usize {
        let authority = self.authority.as_ref().map_or(0, |authority| authority.as_str().len() + FIELD);
        self.path.as_str().len() + FIELD + authority + fields_length(&self.headers)
    }
}

/// Headers that were read. Only headers of requests have a path and an authority.
#[derive(Clone, Debug, Default)]
pub(in crate::grpc) struct Decoded {
    pub(in crate::grpc) path: Option<PathAndQuery>,
    pub(in crate::grpc) authority: Option<Authority>,
    pub(in crate::grpc) headers: HeaderMap,
    /// How much the headers count.
    pub(in crate::grpc) counted: usize,
    /// The headers have more fields than a `HeaderMap` holds, so `headers` lacks the rest. Their call has to
    /// end.
    pub(in crate::grpc) is_overfull: bool,
}

/// Reads the headers of one direction of a connection.
#[derive(Debug)]
pub(in crate::grpc) struct Decoder {
    table: Vec<Entry>,
    /// Bytes of the entries.
    bytes: usize,
    limits: Room,
    /// The most that headers may count.
    header_bytes: usize,
    /// The latest headers of references only, with their meaning. As entries never change, such headers
    /// always mean the same.
    known: VecDeque<KnownBlock>,
    /// Spares are missing.
    incomplete: bool,
}

/// Headers of references only.
#[derive(Debug)]
struct KnownBlock {
    block: Box<[u8]>,
    head: Decoded,
    /// A clone, made in advance: after a message was sent, while the peer works.
    spare: Option<Decoded>,
}

#[derive(Debug)]
enum Entry {
    Path(PathAndQuery),
    Authority(Authority),
    Name(HeaderName),
    Field(HeaderName, HeaderValue),
}

impl Decoder {
    /// Most headers whose meaning is kept.
    const KNOWN: usize = 16;
    /// The longest headers whose meaning is kept, in bytes.
    const KNOWN_LENGTH: usize = 96;

    pub(in crate::grpc) fn new(entries: u32, bytes: u32, header_bytes: u32) -> Self {
        let limits = Room { entries: entries as usize, bytes: bytes as usize };
        let (table, known) = (Vec::new(), VecDeque::new());
        let header_bytes = header_bytes as usize;
        Self { table, bytes: 0, limits, header_bytes, known, incomplete: false }
    }

    /// Reads headers.
    ///
    /// # Errors
    /// The bytes are no headers, or break a limit. Then the table may have changed, and the connection has to
    /// end.
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
            if counted > self.header_bytes {
                return Err(CallViolation::HeadersTooLong(self.header_bytes));
            }
        }
        head.counted = counted;
        if only_references && block.len() <= Self::KNOWN_LENGTH {
            self.known.truncate(Self::KNOWN - 1);
            self.known.push_front(KnownBlock { block: block.into(), head: head.clone(), spare: None });
        }
        Ok(head)
    }

    /// Clones the known headers whose clones were taken. Call this when no answer waits for it.
    pub(in crate::grpc) fn prepare(&mut self) {
        if std::mem::take(&mut self.incomplete) {
            for KnownBlock { head, spare, .. } in &mut self.known {
                spare.get_or_insert_with(|| head.clone());
            }
        }
    }

    /// Adds an entry of the table to the headers. Returns how much it counts.
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
        let Room { entries, bytes } = self.limits;
        self.bytes += length + FIELD;
        if self.table.len() >= entries || self.bytes > bytes {
            return Err(CallViolation::TableFull { entries, bytes });
        }
        self.table.push(entry);
        Ok(())
    }
}

/// Returns whether two short blocks are equal. The bytes have arrived just now, and a comparison of the
/// library's loads them in a way that has to wait until they have left the store buffer.
fn is_same(known: &[u8], block: &[u8]) -> bool {
    let ((known, known_rest), (block, rest)) = (known.as_chunks::<4>(), block.as_chunks::<4>());
    known.len() == block.len()
        && known_rest.len() == rest.len()
        && known.iter().zip(block).all(|(one, other)| u32::from_ne_bytes(*one) == u32::from_ne_bytes(*other))
        && known_rest.iter().zip(rest).all(|(one, other)| one == other)
}

fn bad(what: &'static str) -> CallViolation {
    CallViolation::Headers(what)
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

/// Reads a value. It is copied, because metadata may be kept much longer than the message that it came in. A
/// clone of a common value counts no references.
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

/// Writes the headers of one direction of a connection. What it keeps are copies, because a value of the
/// application may keep much memory, or have an owner whose drop runs code of the application.
#[derive(Debug, Default)]
pub(in crate::grpc) struct Encoder {
    paths: HashMap<PathAndQuery, u16, RandomState>,
    /// A client has one authority, rarely a few.
    authorities: Vec<(Authority, u16)>,
    names: HashMap<HeaderName, Name, RandomState>,
    entries: u16,
    room: Room,
    /// The latest headers that were written as references only. As entries never change, such headers are
    /// always written in the same way.
    known: VecDeque<KnownHeaders>,
}

/// Headers, and how they are written.
#[derive(Debug)]
struct KnownHeaders {
    path: Option<PathAndQuery>,
    authority: Option<Authority>,
    fields: Vec<(HeaderName, HeaderValue)>,
    bytes: Box<[u8]>,
}

/// The size of a table, or the room in it.
#[derive(Clone, Copy, Debug, Default)]
struct Room {
    entries: usize,
    bytes: usize,
}

/// A name in the table.
#[derive(Debug)]
struct Name {
    entry: u16,
    /// The value of its latest use.
    latest: Option<Vec<u8>>,
    /// The values in the table.
    values: Vec<(HeaderValue, u16)>,
}

impl Encoder {
    /// Most values of one name, so that a name does not fill the table.
    const VALUES: usize = 8;
    /// Most authorities.
    const AUTHORITIES: usize = 8;
    /// The longest value in the table, in bytes.
    const VALUE: usize = 512;
    /// Most headers that are known, and most fields of each.
    const KNOWN: usize = 16;
    const FIELDS: usize = 16;
    /// Entries and bytes that this side uses of a larger table.
    const MOST: Room = Room { entries: 1024, bytes: 64 << 10 };

    /// Sets the size of the table that the peer keeps.
    pub(in crate::grpc) fn set_room(&mut self, entries: u32, bytes: u32) {
        let Room { entries: most, bytes: most_bytes } = Self::MOST;
        self.room = Room { entries: most.min(entries as usize), bytes: most_bytes.min(bytes as usize) };
    }

    /// Adds the headers of a request to `out`.
    pub(in crate::grpc) fn request(&mut self, head: &RequestHeaders, out: &mut Vec<u8>) {
        self.write(Some(&head.path), head.authority.as_ref(), &head.headers, out);
    }

    /// Adds fields to `out`.
    pub(in crate::grpc) fn fields(&mut self, headers: &HeaderMap, out: &mut Vec<u8>) {
        self.write(None, None, headers, out);
    }

    /// Adds headers to `out`, as they were written before if they were.
    fn write(
        &mut self,
        path: Option<&PathAndQuery>,
        authority: Option<&Authority>,
        headers: &HeaderMap,
        out: &mut Vec<u8>,
    ) {
        if let Some(known) = self.known.iter().find(|known| known.is(path, authority, headers)) {
            return out.extend_from_slice(&known.bytes);
        }
        let start = out.len();
        if let Some(path) = path {
            self.path(path, out);
        }
        if let Some(authority) = authority {
            self.authority(authority, out);
        }
        for (name, value) in headers {
            self.field(name, value, out);
        }
        let bytes = &out[start..];
        if bytes.chunks(REFERENCE).all(|reference| reference[0] == op::ENTRY) && headers.len() <= Self::FIELDS
        {
            let fields = headers.iter().map(|(name, value)| (name.clone(), self.kept(name, value))).collect();
            let path = path
                .map(|path| self.paths.get_key_value(path).map_or_else(|| own_path(path), |it| it.0.clone()));
            let authority = authority.map(|authority| self.kept_authority(authority));
            self.known.truncate(Self::KNOWN - 1);
            self.known.push_front(KnownHeaders { path, authority, fields, bytes: bytes.into() });
        }
    }

    fn path(&mut self, path: &PathAndQuery, out: &mut Vec<u8>) {
        if let Some(entry) = self.paths.get(path) {
            return reference(*entry, out);
        }
        let entry = self.new_entry(path.as_str().len());
        literal(if entry.is_some() { op::NEW_PATH } else { op::PATH }, path.as_str(), out);
        if let Some(entry) = entry {
            self.paths.insert(own_path(path), entry);
        }
    }

    fn authority(&mut self, authority: &Authority, out: &mut Vec<u8>) {
        let known = self.authorities.iter().find(|(known, _)| known.as_str() == authority.as_str());
        if let Some((_, entry)) = known {
            return reference(*entry, out);
        }
        let text = authority.as_str();
        let is_new = self.authorities.len() < Self::AUTHORITIES;
        let entry = if is_new { self.new_entry(text.len()) } else { None };
        literal(if entry.is_some() { op::NEW_AUTHORITY } else { op::AUTHORITY }, text, out);
        if let Some(entry) = entry {
            self.authorities.push((own_authority(authority), entry));
        }
    }

    /// Returns a clone of the table's authority.
    fn kept_authority(&self, authority: &Authority) -> Authority {
        let known = self.authorities.iter().find(|(known, _)| known.as_str() == authority.as_str());
        known.map_or_else(|| own_authority(authority), |(known, _)| known.clone())
    }

    /// Returns a clone of the table's value.
    fn kept(&self, name: &HeaderName, value: &HeaderValue) -> HeaderValue {
        let mut values = self.names.get(name).into_iter().flat_map(|known| &known.values);
        values.find(|(known, _)| known == value).map_or_else(|| own(value), |(known, _)| known.clone())
    }

    fn field(&mut self, name: &HeaderName, value: &HeaderValue, out: &mut Vec<u8>) {
        let sensitive = if value.is_sensitive() { op::SENSITIVE } else { 0 };
        let room = self.room;
        let Some(known) = self.names.get_mut(name) else {
            let entry = self.new_entry(name.as_str().len());
            literal(
                if entry.is_some() { op::FIELD_NEW_NAME } else { op::FIELD } | sensitive,
                name.as_str(),
                out,
            );
            value_of(value, out);
            if let Some(entry) = entry {
                let latest =
                    (sensitive == 0 && value.len() <= Self::VALUE).then(|| value.as_bytes().to_vec());
                self.names.insert(name.clone(), Name { entry, latest, values: Vec::new() });
            }
            return;
        };
        if sensitive == 0 {
            if let Some((_, entry)) = known.values.iter().find(|(known, _)| known == value) {
                return reference(*entry, out);
            }
            if value.len() <= Self::VALUE {
                let length = name.as_str().len() + value.len() + FIELD;
                let fits = known.values.len() < Self::VALUES && room.entries > 0 && room.bytes >= length;
                if fits && known.latest.as_deref() == Some(value.as_bytes()) {
                    known.values.push((own(value), self.entries));
                    out.push(op::NEW_FIELD);
                    out.extend_from_slice(&known.entry.to_le_bytes());
                    value_of(value, out);
                    self.entries += 1;
                    self.room = Room { entries: room.entries - 1, bytes: room.bytes - length };
                    return;
                }
                if fits {
                    let latest = known.latest.get_or_insert_default();
                    latest.clear();
                    latest.extend_from_slice(value.as_bytes());
                }
            }
        }
        out.push(op::FIELD_OF_NAME | sensitive);
        out.extend_from_slice(&known.entry.to_le_bytes());
        value_of(value, out);
    }

    /// Takes an entry of the table, if there is room for `length` bytes.
    fn new_entry(&mut self, length: usize) -> Option<u16> {
        let bytes = self.room.bytes.checked_sub(length + FIELD)?;
        let entries = self.room.entries.checked_sub(1)?;
        self.room = Room { entries, bytes };
        self.entries += 1;
        Some(self.entries - 1)
    }
}

/// Returns a copy, which has an owner of its own.
fn own(value: &HeaderValue) -> HeaderValue {
    // The bytes come from a valid value, so this does not fail.
    HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone())
}

fn own_path(path: &PathAndQuery) -> PathAndQuery {
    PathAndQuery::try_from(path.as_str()).unwrap_or_else(|_| path.clone())
}

fn own_authority(authority: &Authority) -> Authority {
    Authority::try_from(authority.as_str()).unwrap_or_else(|_| authority.clone())
}

impl KnownHeaders {
    /// Returns whether these are the headers with these parts. A sensitive value is not known, because it is
    /// never a reference.
    fn is(&self, path: Option<&PathAndQuery>, authority: Option<&Authority>, headers: &HeaderMap) -> bool {
        // Headers of one connection differ in their paths first, and in the number of fields.
        self.fields.len() == headers.len()
            && self.path.as_ref() == path
            && self.authority.as_ref().map(Authority::as_str) == authority.map(Authority::as_str)
            && headers
                .iter()
                .zip(&self.fields)
                .all(|((name, value), known)| *name == known.0 && *value == known.1 && !value.is_sensitive())
    }
}

/// The length of a reference to an entry, in bytes.
const REFERENCE: usize = 3;

fn reference(entry: u16, out: &mut Vec<u8>) {
    let [low, high] = entry.to_le_bytes();
    out.extend_from_slice(&[op::ENTRY, low, high]);
}

/// Adds an instruction with a path, an authority or a name. `http` limits all three to 65 535 bytes.
fn literal(op: u8, text: &str, out: &mut Vec<u8>) {
    let [low, high] = (text.len() as u16).to_le_bytes();
    out.extend_from_slice(&[op, low, high]);
    out.extend_from_slice(text.as_bytes());
}

/// Adds a value. The limit of headers keeps it below 4 GiB.
fn value_of(value: &HeaderValue, out: &mut Vec<u8>) {
    out.extend_from_slice(&(value.len() as u32).to_le_bytes());
    out.extend_from_slice(value.as_bytes());
}
