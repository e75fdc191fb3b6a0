//! Headers of safetensors files, beside the format's own library.

use std::{fs, path::PathBuf};

use kvhoist_files::{Error, SourceFile, safetensors::header};
use proptest::prelude::*;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

fn file(folder: &tempfile::TempDir, content: &[u8]) -> PathBuf {
    let path = folder.path().join("model.safetensors");
    fs::write(&path, content).expect("a small file");
    path
}

fn written(shapes: &[(usize, usize)]) -> Vec<u8> {
    let data = vec![3_u8; 4 * 64 * 64];
    let view = |&(rows, columns): &(usize, usize)| {
        TensorView::new(Dtype::F32, vec![rows, columns], &data[..4 * rows * columns]).expect("they fit")
    };
    let tensors = shapes.iter().enumerate().map(|(n, shape)| (format!("tensor.{n}"), view(shape)));
    safetensors::serialize(tensors, None).expect("they can be written")
}

proptest! {
    #[test]
    fn a_header_is_what_the_formats_library_reads(shapes in prop::collection::vec((0..64_usize, 0..64_usize), 0..20)) {
        let folder = tempfile::tempdir().expect("a folder");
        let content = written(&shapes);
        let found = header(&SourceFile::open(file(&folder, &content)).expect("it is there")).expect("it is whole");
        let theirs = SafeTensors::deserialize(&content).expect("it is whole");
        prop_assert_eq!(found.tensors.len(), theirs.len());
        for tensor in &found.tensors {
            let wanted = theirs.tensor(&tensor.name).expect("it is in the file");
            prop_assert_eq!((tensor.dtype.as_str(), &tensor.shape[..]), ("F32", wanted.shape()));
            prop_assert!(&content[tensor.offset as usize..tensor.offset as usize + tensor.len] == wanted.data());
        }
    }

    /// Whatever the format's library refuses is refused, with the file's name; and nothing more.
    #[test]
    fn damaged_files_are_refused_as_the_formats_library_refuses_them(
        at in 0..400_usize, byte in any::<u8>(), cut in prop::option::of(0..1_000_usize),
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut content = written(&[(3, 4), (0, 5), (8, 8)]);
        if let Some(cut) = cut {
            content.truncate(cut);
        }
        if let Some(place) = content.get_mut(at) {
            *place = byte;
        }
        let path = file(&folder, &content);
        match (header(&SourceFile::open(&path).expect("it is there")), SafeTensors::deserialize(&content)) {
            (Ok(_), Ok(_)) => {}
            (Err(error @ Error::Format { .. }), Err(_)) => {
                prop_assert!(error.to_string().contains("model.safetensors: found"), "{}", error);
            }
            (ours, theirs) => prop_assert!(false, "{ours:?} and {theirs:?}"),
        }
    }
}

#[test]
fn dimensions_that_no_reader_multiplies_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    for (shape, is_taken) in [
        ("[0, 7]", true),
        ("[0, 18446744073709551615]", false),
        ("[0, 1099511627776, 1099511627776]", false),
        ("[0, 9223372036854775807]", true),
    ] {
        let text = format!(r#"{{"empty": {{"dtype": "U8", "shape": {shape}, "data_offsets": [0, 0]}}}}"#);
        let content = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        match header(&SourceFile::open(file(&folder, &content)).expect("it is there")) {
            Ok(found) => assert!(is_taken && found.tensors.len() == 1, "{shape}"),
            Err(error) => assert!(!is_taken && error.to_string().contains("found the tensor empty"), "{error}"),
        }
    }
}
