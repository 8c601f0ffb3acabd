//! Writes heads.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery};

use super::{FIELD, RequestHead, op};

/// Writes the heads of one direction of a connection. What it keeps are copies, because a value of the application may keep much memory, or have
/// an owner whose drop runs code of the application.
#[derive(Debug, Default)]
pub(in crate::grpc) struct Encoder {
    paths: HashMap<PathAndQuery, u16, RandomState>,
    /// A client has one authority, rarely a few.
    authorities: Vec<(Authority, u16)>,
    names: HashMap<HeaderName, Name, RandomState>,
    entries: u16,
    room: Room,
    /// The latest heads that were written as references only. As entries never change, such a head is always written in the same way.
    known: Vec<Known>,
}

/// A head, and how it is written.
#[derive(Debug)]
struct Known {
    path: Option<PathAndQuery>,
    authority: Option<Authority>,
    fields: Vec<(HeaderName, HeaderValue)>,
    bytes: Box<[u8]>,
}

/// The room in the table.
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
    /// Most heads that are known, and most fields of each.
    const KNOWN: usize = 16;
    const FIELDS: usize = 16;
    /// Entries and bytes that this end uses of a larger table.
    const MOST: Room = Room { entries: 1024, bytes: 64 << 10 };

    /// Sets the size of the table that the peer keeps.
    pub(in crate::grpc) fn set_room(&mut self, entries: u32, bytes: u32) {
        let Room { entries: most, bytes: most_bytes } = Self::MOST;
        self.room = Room { entries: most.min(entries as usize), bytes: most_bytes.min(bytes as usize) };
    }

    /// Adds the head of a request to `out`.
    pub(in crate::grpc) fn request(&mut self, head: &RequestHead, out: &mut Vec<u8>) {
        self.write(Some(&head.path), head.authority.as_ref(), &head.headers, out);
    }

    /// Adds fields to `out`.
    pub(in crate::grpc) fn fields(&mut self, headers: &HeaderMap, out: &mut Vec<u8>) {
        self.write(None, None, headers, out);
    }

    /// Adds a head to `out`, as it was written before if it was.
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
            self.known.insert(0, Known { path, authority, fields, bytes: bytes.into() });
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
    // The bytes of a value are those of a value.
    HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone())
}

fn own_path(path: &PathAndQuery) -> PathAndQuery {
    PathAndQuery::try_from(path.as_str()).unwrap_or_else(|_| path.clone())
}

fn own_authority(authority: &Authority) -> Authority {
    Authority::try_from(authority.as_str()).unwrap_or_else(|_| authority.clone())
}

impl Known {
    /// Returns whether this is the head with these parts. A sensitive value is not known, because it is never a reference.
    fn is(&self, path: Option<&PathAndQuery>, authority: Option<&Authority>, headers: &HeaderMap) -> bool {
        // Heads of one connection differ in their paths first, and in the number of fields.
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

/// Adds a value. The limit of heads keeps it below 4 GiB.
fn value_of(value: &HeaderValue, out: &mut Vec<u8>) {
    out.extend_from_slice(&(value.len() as u32).to_le_bytes());
    out.extend_from_slice(value.as_bytes());
}
