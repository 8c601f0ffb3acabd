//! Messages of the user's service: from JSON and to JSON, as protobuf defines it, with errors that name the
//! field.

use prost_reflect::{Cardinality, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor};
use serde_json::Value;
use tonic_rdma_commands::{Context as _, Failure};

use crate::call::service::{accepted, nearest};

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
            // Some messages of protobuf are arrays themselves.
            Value::Array(items) if !is_well_known(kind) => values.extend(items),
            value => values.push(value),
        }
    }
    let message = |value: &Value| {
        let refused = |error| Failure::usage(format!("{option}: {}", explain(kind, value, "", error)));
        DynamicMessage::deserialize(kind.clone(), value).map_err(refused)
    };
    values.iter().map(message).collect()
}

/// Returns `message` as JSON.
pub(crate) fn to_json(message: &DynamicMessage) -> Result<String, Failure> {
    serde_json::to_string_pretty(message).context("the answer can't be written as JSON")
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
