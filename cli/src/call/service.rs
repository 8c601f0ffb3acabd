//! The descriptors of the user's services: from the server by reflection, or from a file. Also their
//! description for people.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use prost_reflect::prost::Message as _;
use prost_reflect::prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet, MessageOptions,
    field_descriptor_proto,
};
use prost_reflect::{
    DescriptorPool, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor,
    ServiceDescriptor,
};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use tonic_rdma_commands::{Context as _, Failure, ValueError};
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

use crate::call::channel::{Connection, Header, SETUP, code_name, metadata};
use crate::call::message::{example, type_of};
use crate::compare::modes::call_error::deepest;

/// Most files that a server's reflection may name.
const MOST_FILES: usize = 10_000;
/// The largest answer of a server's reflection, in bytes.
const LARGEST_ANSWER: usize = 64 << 20;
/// Most names in an error.
const MOST_NAMES: usize = 20;

/// The versions of reflection, from the newest. Their messages are alike.
const VERSIONS: [&str; 2] = [
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

/// The services of a server.
#[derive(Debug)]
pub(crate) struct Services {
    pool: DescriptorPool,
    /// The full names of all services, also of those whose files were not asked for.
    names: Vec<String>,
}

impl Services {
    /// Reads the descriptors that `protoc --include_imports --descriptor_set_out` writes.
    pub(crate) fn read(file: &Path) -> Result<Self, Failure> {
        let bad = |what: &str| format!("--descriptor-set: {} {what}", file.display());
        let bytes = std::fs::read(file);
        let bytes = bytes.map_err(|error| Failure::usage(bad("can't be read")).because(error))?;
        let what = "is no complete set of descriptors, as protoc --include_imports --descriptor_set_out=FILE writes it";
        let set = FileDescriptorSet::decode(&*bytes);
        let set = set.map_err(|error| Failure::usage(bad(what)).because(error))?;
        check_maps(&set).map_err(|fault| Failure::usage(bad(what)).because(fault))?;
        // This keeps the options that prost's type of a set leaves out.
        let pool = DescriptorPool::decode(&*bytes);
        let pool = pool.map_err(|error| Failure::usage(bad(what)).because(error))?;
        let names = pool.services().map(|service| service.full_name().to_owned()).collect();
        Ok(Self { pool, names })
    }

    /// Asks the server of `connection` for the services that it has, and for the files of those that `wanted`
    /// names, within 20 s.
    pub(crate) async fn of_server(
        connection: &Connection,
        headers: &[Header],
        wanted: impl Fn(&[String]) -> Result<Vec<String>, Failure>,
    ) -> Result<Self, Failure> {
        let metadata = metadata(headers, SETUP);
        let mut reflection =
            Reflection { connection: connection.limited(LARGEST_ANSWER), metadata, version: 0 };
        let asking = async {
            let names = reflection.names().await?;
            let pool = reflection.files(wanted(&names)?).await?;
            Ok(Self { pool, names })
        };
        let silent =
            || Failure::run(format!("the server's reflection gave no answer within {} s", SETUP.as_secs()));
        tokio::time::timeout(SETUP, asking).await.unwrap_or_else(|_| Err(silent()))
    }

    /// Returns the method that `text` names: SERVICE/METHOD.
    pub(crate) fn method(&self, text: &str) -> Result<MethodDescriptor, Failure> {
        let (service, method) = split(text)?;
        let service = self.service(service)?;
        let found = service.methods().find(|each| each.name() == method);
        found.ok_or_else(|| {
            let names: Vec<String> = service.methods().map(|each| each.name().to_owned()).collect();
            let service = service.full_name();
            Failure::usage(format!("{service} has no method {method:?}; {}", accepted(method, &names)))
        })
    }

    fn service(&self, name: &str) -> Result<ServiceDescriptor, Failure> {
        let name = full_name(&self.names, name)?;
        let missing = || Failure::run(format!("the server has no description of {name}"));
        self.pool.get_service_by_name(&name).ok_or_else(missing)
    }

    /// Returns the methods of all services, or of the one that `text` names, one a line.
    pub(crate) fn list(&self, text: Option<&str>) -> Result<String, Failure> {
        let services = self.those_of(text)?;
        let lines = services.iter().flat_map(methods).map(|method| signature(&method));
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }

    /// Returns the services that were asked for, or the one that `text` names.
    fn those_of(&self, text: Option<&str>) -> Result<Vec<ServiceDescriptor>, Failure> {
        match text {
            Some(name) => Ok(vec![self.service(name.trim_matches('/'))?]),
            None => Ok(self.names.iter().filter_map(|name| self.pool.get_service_by_name(name)).collect()),
        }
    }

    /// Describes a service, a method, or all services, with the messages of their calls, as a `.proto` file
    /// does.
    pub(crate) fn describe(&self, text: Option<&str>) -> Result<String, Failure> {
        let methods = match (self.those_of(text), text) {
            (Ok(services), _) => services.iter().flat_map(methods).collect(),
            (Err(_), Some(text)) if split(text).is_ok() => vec![self.method(text)?],
            (Err(failure), _) => return Err(failure),
        };
        let mut described = Described::default();
        for method in &methods {
            described.text += &format!("{}\n", signature(method));
            if let Some(json) = example(&method.input()) {
                described.text += &format!("  -d '{json}'\n");
            }
        }
        for method in &methods {
            described.add(Kind::Message(method.input()));
            described.add(Kind::Message(method.output()));
        }
        Ok(described.text.trim_end().to_owned())
    }
}

/// Returns the service names that a request for `text` needs the files of: of the service that it begins
/// with, or of all.
pub(crate) fn wanted(names: &[String], text: Option<&str>) -> Result<Vec<String>, Failure> {
    let Some(text) = text else { return Ok(names.to_vec()) };
    let service = full_name(names, text.trim_matches('/'));
    let found = service.or_else(|failure| match split(text) {
        Ok((service, _)) => full_name(names, service),
        Err(_) => Err(failure),
    });
    found.map(|name| vec![name])
}

/// Returns the path of a method in a request.
pub(crate) fn path(method: &MethodDescriptor) -> Result<PathAndQuery, Failure> {
    let text = format!("/{}/{}", method.parent_service().full_name(), method.name());
    PathAndQuery::try_from(text).context("the method's name makes no path")
}

/// Splits SERVICE/METHOD; a dot in place of the slash is accepted.
fn split(text: &str) -> Result<(&str, &str), Failure> {
    let text = text.strip_prefix('/').unwrap_or(text);
    let halves = text.rsplit_once('/').or_else(|| text.rsplit_once('.'));
    let is_whole = |(service, method): &(&str, &str)| !service.is_empty() && !method.is_empty();
    halves.filter(is_whole).ok_or_else(|| {
        Failure::usage(format!(
            "{text:?} is no method; accepted: SERVICE/METHOD; --list shows those of the server"
        ))
    })
}

/// Returns the full name of the service `name`, which may lack the package if one service alone has that
/// name.
fn full_name(names: &[String], name: &str) -> Result<String, Failure> {
    let is_short = |full: &&String| full.rsplit('.').next() == Some(name);
    let mut short = names.iter().filter(is_short);
    let only = short.next().filter(|_| short.next().is_none());
    let found = names.iter().find(|full| *full == name).or(only).cloned();
    found.ok_or_else(|| Failure::usage(format!("there is no service {name:?}; {}", accepted(name, names))))
}

/// Says which of `names` was probably meant by `given`, and which are accepted.
pub(crate) fn accepted(given: &str, names: &[String]) -> String {
    let meant = nearest(given, names).map_or_else(String::new, |meant| format!("did you mean {meant}? "));
    let shown = names.iter().take(MOST_NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
    let rest = names.len().saturating_sub(MOST_NAMES);
    match (shown.as_str(), rest) {
        ("", _) => "there are none".to_owned(),
        (shown, 0) => format!("{meant}accepted: {shown}"),
        (shown, rest) => format!("{meant}accepted: {shown}, and {rest} more"),
    }
}

/// Returns the name that `given` was probably meant to be.
pub(crate) fn nearest<'a>(given: &str, names: &'a [String]) -> Option<&'a String> {
    /// The least similarity of a misspelt name.
    const SIMILAR: f64 = 0.8;
    let given = given.to_lowercase();
    let scored = names.iter().map(|name| (strsim::jaro_winkler(&given, &name.to_lowercase()), name));
    let best = scored.max_by(|(one, _), (other, _)| one.total_cmp(other))?;
    (best.0 >= SIMILAR).then_some(best.1)
}

/// The reflection service of a server.
#[derive(Debug)]
struct Reflection {
    connection: Connection,
    metadata: MetadataMap,
    /// An index of [`VERSIONS`].
    version: usize,
}

impl Reflection {
    /// Returns the full names of all services.
    async fn names(&mut self) -> Result<Vec<String>, Failure> {
        let MessageResponse::ListServicesResponse(list) =
            self.ask(MessageRequest::ListServices(String::new())).await?
        else {
            return Err(Failure::run("the server's reflection answers with no list of services"));
        };
        Ok(list.service.into_iter().map(|service| service.name).collect())
    }

    /// Returns the files that define `services`, and all files that these need.
    async fn files(&mut self, services: Vec<String>) -> Result<DescriptorPool, Failure> {
        // This pool has the files that come with protobuf.
        let mut pool = DescriptorPool::global();
        let (mut files, mut asked) = (BTreeMap::new(), BTreeSet::new());
        let mut wanted: Vec<_> = services.into_iter().map(MessageRequest::FileContainingSymbol).collect();
        while let Some(request) = wanted.pop() {
            let MessageResponse::FileDescriptorResponse(answer) = self.ask(request).await? else {
                return Err(Failure::run("the server's reflection answers with no file"));
            };
            for bytes in answer.file_descriptor_proto {
                let file =
                    FileDescriptorProto::decode(&*bytes).context("a file of the server can't be decoded")?;
                for needed in &file.dependency {
                    if pool.get_file_by_name(needed).is_none() && asked.insert(needed.clone()) {
                        wanted.push(MessageRequest::FileByFilename(needed.clone()));
                    }
                }
                if pool.get_file_by_name(file.name()).is_none() {
                    asked.insert(file.name().to_owned());
                    files.insert(file.name().to_owned(), file);
                }
            }
            if asked.len() > MOST_FILES {
                return Err(Failure::run(format!(
                    "the server's reflection names more than {MOST_FILES} files"
                )));
            }
        }
        // A file may have come with another one before it was asked for.
        let set = FileDescriptorSet { file: files.into_values().collect() };
        let misfit = "the server's descriptors don't fit together";
        check_maps(&set).map_err(|fault| Failure::run(misfit).because(fault))?;
        pool.add_file_descriptor_set(set).context(misfit)?;
        Ok(pool)
    }

    /// Asks a question, in the newest version that the server has.
    async fn ask(&mut self, question: MessageRequest) -> Result<MessageResponse, Failure> {
        let what = match &question {
            MessageRequest::FileContainingSymbol(name) => format!("the file of {name}"),
            MessageRequest::FileByFilename(name) => format!("the file {name}"),
            _ => "its services".to_owned(),
        };
        let failed = |status: Status| {
            Failure::run(format!("the server's reflection does not give {what}: {}", describe(&status)))
        };
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
        loop {
            match self.exchange(&request).await {
                Ok(ServerReflectionResponse { message_response: Some(response), .. }) => match response {
                    MessageResponse::ErrorResponse(error) => {
                        return Err(failed(Status::new(Code::from(error.error_code), error.error_message)));
                    }
                    response => return Ok(response),
                },
                Ok(_) => return Err(failed(Status::internal("an empty answer"))),
                Err(status) if status.code() != Code::Unimplemented => return Err(failed(status)),
                Err(_) if self.version + 1 < VERSIONS.len() => self.version += 1,
                Err(_) => {
                    return Err(Failure::run(
                        "the server has no reflection (grpc.reflection.v1, v1alpha); give it the service, or this command \
                         --descriptor-set FILE, which protoc --include_imports --descriptor_set_out=FILE writes",
                    ));
                }
            }
        }
    }

    async fn exchange(
        &mut self,
        request: &ServerReflectionRequest,
    ) -> Result<ServerReflectionResponse, Status> {
        let path = PathAndQuery::from_static(VERSIONS[self.version]);
        let request = tokio_stream::once(request.encode_to_vec().into());
        let mut answers = self.connection.call(&path, &self.metadata, request).await?.into_inner();
        let answer = answers.message().await?.ok_or_else(|| Status::internal("no answer"))?;
        ServerReflectionResponse::decode(answer).map_err(|error| Status::internal(error.to_string()))
    }
}

/// Checks that each entry of a map has a key and a value, because the library panics if it has not.
fn check_maps(set: &FileDescriptorSet) -> Result<(), ValueError> {
    use field_descriptor_proto::{Label, Type};
    let is_entry = |message: &DescriptorProto| {
        let single = |number| {
            let field = message.field.iter().find(|field| field.number() == number);
            field.filter(|field| field.label() == Label::Optional)
        };
        let is_key = |field: &FieldDescriptorProto| {
            let never = [Type::Double, Type::Float, Type::Bytes, Type::Message, Type::Group, Type::Enum];
            !never.contains(&field.r#type())
        };
        single(1).is_some_and(is_key) && single(2).is_some()
    };
    for file in &set.file {
        let mut messages: Vec<&DescriptorProto> = file.message_type.iter().collect();
        while let Some(message) = messages.pop() {
            messages.extend(&message.nested_type);
            if message.options.as_ref().is_some_and(MessageOptions::map_entry) && !is_entry(message) {
                let (file, name) = (file.name(), message.name());
                return Err(ValueError(format!(
                    "{file}: {name} is no entry of a map: it needs key = 1, value = 2"
                )));
            }
        }
    }
    Ok(())
}

/// Returns code and message of a status.
pub(crate) fn describe(status: &Status) -> String {
    let message = deepest(status);
    let separator = if message.is_empty() { "" } else { ": " };
    format!("{}{separator}{message}", code_name(status.code()))
}

fn methods(service: &ServiceDescriptor) -> Vec<MethodDescriptor> {
    service.methods().collect()
}

/// Returns a method as SERVICE/METHOD with its messages.
fn signature(method: &MethodDescriptor) -> String {
    let stream = |is_stream: bool| if is_stream { "stream " } else { "" };
    format!(
        "{}/{}({}{}) returns ({}{})",
        method.parent_service().full_name(),
        method.name(),
        stream(method.is_client_streaming()),
        method.input().full_name(),
        stream(method.is_server_streaming()),
        method.output().full_name(),
    )
}

/// Messages and enums as `.proto` files have them, each once.
#[derive(Debug, Default)]
struct Described {
    text: String,
    seen: BTreeSet<String>,
}

impl Described {
    /// Adds a message or an enum, and those that it has, which may be a long chain.
    fn add(&mut self, kind: Kind) {
        let mut left = vec![kind];
        while let Some(kind) = left.pop() {
            let name = match &kind {
                Kind::Message(message) => message.full_name(),
                Kind::Enum(choices) => choices.full_name(),
                _ => continue,
            };
            if name.starts_with("google.protobuf.") || !self.seen.insert(name.to_owned()) {
                continue;
            }
            match kind {
                Kind::Message(message) => left.extend(self.message(&message).into_iter().rev()),
                Kind::Enum(choices) => self.choices(&choices),
                _ => {}
            }
        }
    }

    /// Adds a message. Returns the types of its fields.
    fn message(&mut self, message: &MessageDescriptor) -> Vec<Kind> {
        let name = message.full_name();
        let _ = writeln!(self.text, "\nmessage {name} {{");
        for field in message.fields() {
            let oneof = field.containing_oneof().filter(|oneof| !oneof.is_synthetic());
            let oneof = oneof.map_or_else(String::new, |oneof| format!(" // of oneof {}", oneof.name()));
            let (kind, name, number) = (type_of(&field), field.name().to_owned(), field.number());
            let _ = writeln!(self.text, "  {kind} {name} = {number};{oneof}");
        }
        self.text += "}\n";
        let kind = |field: FieldDescriptor| match field.kind() {
            Kind::Message(entry) if field.is_map() => entry.map_entry_value_field().kind(),
            kind => kind,
        };
        message.fields().map(kind).collect()
    }

    fn choices(&mut self, choices: &EnumDescriptor) {
        let _ = writeln!(self.text, "\nenum {} {{", choices.full_name());
        for value in choices.values() {
            let _ = writeln!(self.text, "  {} = {};", value.name(), value.number());
        }
        self.text += "}\n";
    }
}
