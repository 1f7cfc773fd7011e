import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.hdfs.MiniDFSCluster;

/** A real HDFS of one name node and one data node, until its standard input ends. Prints its port. */
public class MiniHdfs {
  public static void main(String[] arguments) throws Exception {
    Configuration configuration = new Configuration();
    configuration.set("hdfs.minidfs.basedir", arguments[0]);
    try (MiniDFSCluster cluster = new MiniDFSCluster.Builder(configuration).numDataNodes(1).build()) {
      cluster.waitActive();
      cluster.getFileSystem().mkdirs(new Path("/small"));
      cluster.getFileSystem().setQuota(new Path("/small"), 3, Long.MAX_VALUE - 1);
      System.out.println("\nPORT " + cluster.getNameNodePort());
      System.out.flush();
      while (System.in.read() >= 0) {}
    }
  }
}
