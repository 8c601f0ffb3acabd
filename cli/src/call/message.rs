//! Messages of the user's service: from JSON and to JSON, as protobuf defines it, with errors that name the
//! field.

use std::io::{self, Write};

use prost_reflect::{Cardinality, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor};
use serde::Serialize as _;
use serde_json::Value;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use tonic_rdma_commands::{Context as _, Failure};

use crate::call::service::{accepted, nearest};

/// The deepest JSON of an answer. A message that the decoder takes is never so deep, unless it has an `Any`.
const MOST_DEPTH: usize = 256;
/// The messages that are arrays in JSON.
const ARRAYS: [&str; 2] = ["google.protobuf.ListValue", "google.protobuf.Value"];

/// Parses the JSON values of `text`, one after the other or in an array, as messages of `kind`. `option`
/// names their origin in an error.
pub(crate) fn parse(
    option: &str,
    kind: &MessageDescriptor,
    text: &str,
) -> Result<Vec<DynamicMessage>, Failure> {
    let mut values = Vec::new();
    for value in serde_json::Deserializer::from_str(text).into_iter() {
        let number = values.len() + 1;
        let bad = |error| Failure::usage(format!("{option}: value {number} is no JSON: {error}"));
        match value.map_err(bad)? {
            // Two messages of protobuf are arrays themselves.
            Value::Array(items) if !ARRAYS.contains(&kind.full_name()) => values.extend(items),
            value => values.push(value),
        }
    }
    let message = |value: &Value| {
        let refused = |error| Failure::usage(format!("{option}: {}", explain(kind, value, "", error)));
        DynamicMessage::deserialize(kind.clone(), value).map_err(refused)
    };
    values.iter().map(message).collect()
}

/// Returns `message` as JSON. Fails if it is too deep: each `Any` in it is decoded when it is written, so the limit of
/// the decoder does not hold.
pub(crate) fn to_json(message: &DynamicMessage) -> Result<String, Failure> {
    let mut json = Vec::new();
    let format = Limited { pretty: PrettyFormatter::new(), depth: 0 };
    let written = message.serialize(&mut Serializer::with_formatter(&mut json, format));
    written.context("the answer can't be written as JSON")?;
    String::from_utf8(json).context("the answer can't be written as JSON")
}

/// Writes JSON as serde_json does for people, to a limit of depth.
#[derive(Debug)]
struct Limited {
    pretty: PrettyFormatter<'static>,
    depth: usize,
}

impl Limited {
    fn deeper(&mut self) -> io::Result<&mut PrettyFormatter<'static>> {
        self.depth += 1;
        let too_deep = || io::Error::other(format!("it is more than {MOST_DEPTH} values deep"));
        if self.depth <= MOST_DEPTH { Ok(&mut self.pretty) } else { Err(too_deep()) }
    }

    fn back(&mut self) -> &mut PrettyFormatter<'static> {
        self.depth -= 1;
        &mut self.pretty
    }
}

impl Formatter for Limited {
    fn begin_array<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.deeper()?.begin_array(to)
    }

    fn end_array<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.back().end_array(to)
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.pretty.begin_array_value(to, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.pretty.end_array_value(to)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.deeper()?.begin_object(to)
    }

    fn end_object<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.back().end_object(to)
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.pretty.begin_object_key(to, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.pretty.begin_object_value(to)
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, to: &mut W) -> io::Result<()> {
        self.pretty.end_object_value(to)
    }
}

/// Returns the JSON of a message of `kind` with all fields that have a default.
pub(crate) fn example(kind: &MessageDescriptor) -> Option<String> {
    let options = prost_reflect::SerializeOptions::new().skip_default_fields(false);
    let message = DynamicMessage::new(kind.clone());
    message.serialize_with_options(serde_json::value::Serializer, &options).ok().map(|json| json.to_string())
}

/// Returns whether protobuf defines a JSON form of its own for `kind`.
fn is_well_known(kind: &MessageDescriptor) -> bool {
    kind.full_name().starts_with("google.protobuf.")
}

/// Says which field of `value` makes that it is no message of `kind`, and what is accepted. `path` leads to
/// it from the message of the call.
fn explain(kind: &MessageDescriptor, value: &Value, path: &str, error: serde_json::Error) -> String {
    let name = kind.full_name();
    let Value::Object(entries) = value else {
        let path = if path.is_empty() { String::new() } else { format!("field {path:?}: ") };
        return format!("{path}{value} is no {name}: {error}");
    };
    for (key, item) in entries.iter().filter(|_| !is_well_known(kind)) {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let Some(field) = kind.get_field_by_json_name(key).or_else(|| kind.get_field_by_name(key)) else {
            let names: Vec<String> = kind.fields().map(|field| field.name().to_owned()).collect();
            return format!("{name} has no field {path:?}; {}", accepted(key, &names));
        };
        let alone = Value::Object([(key.clone(), item.clone())].into_iter().collect());
        let Err(error) = DynamicMessage::deserialize(kind.clone(), &alone) else { continue };
        let (Kind::Message(inner), false) = (field.kind(), field.is_map()) else {
            return format!("field {path:?} takes {}{}: {error}", type_of(&field), values_of(&field, item));
        };
        let items = match item {
            Value::Array(items) if field.is_list() => items.iter().enumerate().collect(),
            item => vec![(usize::MAX, item)],
        };
        for (index, item) in items {
            let path = if index == usize::MAX { path.clone() } else { format!("{path}[{index}]") };
            if let Err(error) = DynamicMessage::deserialize(inner.clone(), item) {
                return explain(&inner, item, &path, error);
            }
        }
        return format!("field {path:?} takes {}: {error}", type_of(&field));
    }
    // Such as two fields of which a message has one.
    format!("{name}: {error}")
}

/// Returns what an enum accepts in place of `item`, after a semicolon.
fn values_of(field: &FieldDescriptor, item: &Value) -> String {
    let Kind::Enum(kind) = field.kind() else { return String::new() };
    let names: Vec<String> = kind.values().map(|value| value.name().to_owned()).collect();
    let meant = item.as_str().and_then(|given| nearest(given, &names));
    let meant = meant.map_or_else(String::new, |meant| format!("; did you mean {meant}?"));
    format!(" ({}{meant})", names.join(", "))
}

/// Returns the type of a field as a `.proto` file has it.
pub(crate) fn type_of(field: &FieldDescriptor) -> String {
    let of = |field: &FieldDescriptor| match field.kind() {
        Kind::Message(message) => message.full_name().to_owned(),
        Kind::Enum(kind) => kind.full_name().to_owned(),
        scalar => format!("{scalar:?}"),
    };
    if let (true, Kind::Message(entry)) = (field.is_map(), field.kind()) {
        return format!("map<{}, {}>", of(&entry.map_entry_key_field()), of(&entry.map_entry_value_field()));
    }
    let label = match field.cardinality() {
        Cardinality::Repeated => "repeated ",
        Cardinality::Required => "required ",
        Cardinality::Optional if field.field_descriptor_proto().proto3_optional() => "optional ",
        Cardinality::Optional => "",
    };
    format!("{label}{}", of(field))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use prost_reflect::DescriptorPool;
    use prost_reflect::prost::Message as _;
    use prost_reflect::prost_types::Any;

    use super::*;

    /// Returns an `Any` in an `Any` and so on, of this depth. The innermost one has an empty message.
    fn nested(depth: usize) -> DynamicMessage {
        let url = |name: &str| format!("type.googleapis.com/google.protobuf.{name}");
        let mut any = Any { type_url: url("Empty"), value: Vec::new() };
        for _ in 1..depth {
            any = Any { type_url: url("Any"), value: any.encode_to_vec() };
        }
        let kind = DescriptorPool::global().get_message_by_name("google.protobuf.Any").unwrap();
        DynamicMessage::decode(kind, &*any.encode_to_vec()).unwrap()
    }

    /// The limit of the decoder does not hold for what an `Any` has.
    #[test]
    fn answers_are_written_to_a_limit_of_depth() {
        let json = to_json(&nested(MOST_DEPTH - 1)).unwrap();
        assert_eq!(json.matches("google.protobuf.Any").count(), MOST_DEPTH - 2);
        for depth in [MOST_DEPTH + 1, 5000] {
            let error = to_json(&nested(depth)).unwrap_err().with_causes();
            assert!(error.contains("can't be written as JSON") && error.contains("deep"), "{error}");
        }
    }

    #[test]
    fn an_array_is_one_value_only_of_types_that_are_arrays() {
        let parsed = |name: &str, text| {
            let kind = DescriptorPool::global().get_message_by_name(&format!("google.protobuf.{name}"));
            parse("-d", &kind.unwrap(), text).unwrap().len()
        };
        for (name, text, count) in [
            ("ListValue", "[1, 2]", 1),
            ("Value", "[1, 2]", 1),
            ("Struct", r#"[{"a": 1}, {}]"#, 2),
            ("Empty", "[{}, {}, {}]", 3),
            ("Int32Value", "[1, 2]", 2),
        ] {
            assert_eq!(parsed(name, text), count, "{name}");
        }
    }
}
